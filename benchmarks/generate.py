"""Generation: tokens per second, ours with and without its KV cache, against `transformers.generate` with its cache.

One random model of 124M, float32, greedy, one prompt; a second row of ours continues 8 prompts in a batch, including
that one. Rows take turns on all cores, after a warm-up, and a ratio is the median over the rounds. Every row must
generate the same tokens for that prompt.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from benchmarks.machine import table
from common.cli import positive_int
from common.errors import ToolkitError
from common.settings import GenerateSettings, ModelSettings

_GPT2 = ModelSettings(n_layer=12, n_head=12, n_embd=768, seq_len=1024, dropout=0.0)
_TINY = ModelSettings(n_layer=2, n_head=2, n_embd=32, seq_len=256, dropout=0.0)
_PEER = "transformers.generate"
_ROWS = ("training.generate", "training.generate, 8 prompts", "ours without a cache")
_Run = Callable[[int], list[list[int]]]  # number of new tokens -> new tokens of each text


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead of 124M, as a smoke test")
    parser.add_argument(
        "--row", choices=_ROWS, action="append", help="rows in addition to transformers.generate (default: all)"
    )
    parser.add_argument("--prompt-tokens", type=positive_int, default=32, metavar="N", help="default 32")
    parser.add_argument("--tokens", type=positive_int, default=128, metavar="N", help="new tokens (default 128)")
    parser.add_argument("--rounds", type=positive_int, default=5, metavar="N", help="rounds per row (default 5)")


def measure(arguments: argparse.Namespace) -> str:
    """Rows of tokens per second."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from training.huggingface.pretrained import to_hugging_face
    from training.inference.load import model_from_weights
    from training.inference.sampling import continue_tokens
    from training.model import GPT2, initial_value

    settings = _TINY if arguments.tiny else _GPT2
    with torch.device("meta"):
        names = GPT2(settings).named_parameters()
    weights = {name: initial_value(name, parameter.shape, settings, 1) for name, parameter in names}
    ours = model_from_weights(settings, weights)
    same: dict[str, Any] = settings.model_dump(include={"vocab_size", "n_embd", "n_layer", "n_head"})
    same |= {"n_positions": settings.seq_len, "attn_implementation": "sdpa"}
    theirs: Any = GPT2LMHeadModel(GPT2Config(**same)).eval()  # type: ignore[no-untyped-call]
    theirs.load_state_dict(to_hugging_face(weights, settings), strict=False)
    theirs.tie_weights()
    del weights

    count, end = arguments.tokens, settings.vocab_size - 1
    prompts = torch.randint(end, (8, arguments.prompt_tokens), generator=torch.Generator().manual_seed(1)).tolist()
    first = torch.tensor([prompts[0]])

    def peer(count: int) -> list[list[int]]:
        ids = {"eos_token_id": end, "pad_token_id": end}
        found = theirs.generate(
            first, attention_mask=torch.ones_like(first), max_new_tokens=count, do_sample=False, **ids
        )
        return [found[0, first.shape[1] :].tolist()]

    def cached(texts: list[list[int]], count: int) -> list[list[int]]:
        return continue_tokens(ours, texts, GenerateSettings(max_tokens=count, temperature=0), end)

    def without_cache(count: int) -> list[list[int]]:
        text = first
        for _ in range(count):
            with torch.inference_mode():
                text = torch.cat([text, ours(text)[:, -1:].argmax(dim=-1)], dim=1)
        return [text[0, first.shape[1] :].tolist()]

    runs = (partial(cached, prompts[:1]), partial(cached, prompts), without_cache)
    own: dict[str, _Run] = dict(zip(_ROWS, runs, strict=True))
    rows: dict[str, _Run] = {_PEER: peer, **{label: own[label] for label in arguments.row or _ROWS}}
    for run in rows.values():
        run(2)  # warm-up: the prompt, and one more token
    rate: dict[str, list[float]] = {label: [] for label in rows}
    made: dict[str, list[list[int]]] = {}
    for _ in range(arguments.rounds):
        for label, run in rows.items():
            started = time.perf_counter()
            made[label] = run(count)
            rate[label].append(sum(map(len, made[label])) / (time.perf_counter() - started))
            if made[label][0] != made[_PEER][0]:
                raise ToolkitError(f"{label}: its text differs from that of {_PEER}")
    return table(
        [
            {
                "generating": label,
                "new tokens": f"{sum(map(len, made[label])):,}",
                "tokens/s": f"{median(rates):,.1f}",
                "ratio": f"{median(r / p for r, p in zip(rates, rate[_PEER], strict=True)):.2f}",
            }
            for label, rates in rate.items()
        ]
    )
