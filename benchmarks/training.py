"""Benchmarks of training.

    python -m benchmarks.training step --size 124m
    python -m benchmarks.training bytes --size 345m

Each prints tables for docs/benchmarks_training.md; a ratio is the speed relative to a peer in the
same run.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks import checkpoint, harness, ledger, planning, step
from benchmarks.harness import Case, Row, Timed, compare
from common import cli
from common.errors import ToolkitError
from common.settings import GenerateSettings


def generate(arguments: Namespace) -> Iterator[Row]:
    """Greedy float32 text of 124M with random weights against transformers; both cache keys.

    A prompt of 32 tokens; the last rows continue 8 prompts in a batch, the first of them the same.
    """
    import torch

    from training.inference.load import load_model
    from training.inference.sampling import continue_tokens

    settings = step.SIZES[arguments.size].model.model_copy(update={"seq_len": 1024})
    theirs = step.hugging_face(settings, settings.vocab_size).eval()
    theirs.save_pretrained(arguments.work / "model")
    ours, _ = load_model(arguments.work / "model")
    device = next(ours.parameters()).device
    theirs.to(device)
    end = settings.vocab_size - 1
    prompts = torch.randint(end, (8, 32), generator=torch.Generator().manual_seed(1)).tolist()

    def peer(texts: list[list[int]], count: int) -> list[list[int]]:
        given = torch.tensor(texts, device=device)
        options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "pad_token_id": end}
        texts_with_prompts = theirs.generate(given, attention_mask=torch.ones_like(given), **options)
        return [tokens[32:].tolist() for tokens in texts_with_prompts]

    def cached(texts: list[list[int]], count: int) -> list[list[int]]:
        return continue_tokens(ours, texts, GenerateSettings(max_tokens=count, temperature=0), end)

    expected = peer(prompts[:1], arguments.count)[0]

    def checked(run: Callable[[int], list[list[int]]]) -> Timed:
        run(2)  # the prompt, and one more token

        def generated() -> dict[str, object]:
            same = run(arguments.count)[0] == expected
            if device.type == "cpu" and not same:  # on GPUs close logits may differ
                raise ToolkitError("generated another text than transformers")
            return {"as transformers": "yes" if same else "no"}

        return generated

    for number, label in ((1, ""), (8, ", 8 prompts")):
        contenders = {
            f"transformers.generate{label}": checked(partial(peer, prompts[:number])),
            f"training.generate{label}": checked(partial(cached, prompts[:number])),
        }
        tokens = number * arguments.count
        yield from compare("generating", contenders, arguments.rounds, tokens, "tokens", here=True)


CASES: dict[str, Case] = {
    "bytes": (ledger.measure, {"size": "345m", "micro-batch": 16, "dropout": 0.0, "tensor": 1, "kernels": "on"}),
    "step": (step.measure, {"size": "124m", "rounds": 5}),
    "checkpoint": (checkpoint.measure, {"size": "124m", "rounds": 3}),
    "planning": (planning.measure, {}),
    "generate": (generate, {"size": "124m", "count": 128, "rounds": 5}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return harness.main("training", __doc__, CASES, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
