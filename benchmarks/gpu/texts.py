"""Generation on the GPU: 124M with random weights, float32, greedy, a prompt of 32 tokens and 128 more.

Both cache keys and values. The texts of both may part at a token whose logit another one nearly equals.
"""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.clock import seconds
from benchmarks.gpu.items import Context, Item, Row
from common.settings import GenerateSettings, ModelSettings

TITLE = "Generating: tokens per second"

_GPT2 = ModelSettings(n_layer=12, n_head=12, n_embd=768, seq_len=1024, dropout=0.0)
_TINY = ModelSettings(n_layer=2, n_head=2, n_embd=32, seq_len=256, dropout=0.0)


def items(_toy: bool) -> list[Item]:
    """One item for the whole table."""
    return [Item("generate", "greedy", 15)]


def run(_item: Item, context: Context) -> Iterator[Row]:
    """Rows of ours, for 1 and 8 prompts, and of transformers."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from training.huggingface.pretrained import to_hugging_face
    from training.inference.load import model_from_weights
    from training.inference.sampling import continue_tokens
    from training.model import GPT2, initial_value

    device = torch.device("cuda" if context.gpu else "cpu")
    settings, count = (_TINY, 8) if context.toy else (_GPT2, 128)
    with torch.device("meta"):
        names = list(GPT2(settings).named_parameters())
    weights = {name: initial_value(name, parameter.shape, settings, 1) for name, parameter in names}
    same: dict[str, Any] = settings.model_dump(include={"vocab_size", "n_embd", "n_layer", "n_head"})
    same |= {"n_positions": settings.seq_len, "attn_implementation": "sdpa"}
    theirs: Any = GPT2LMHeadModel(GPT2Config(**same)).eval()  # type: ignore[no-untyped-call]
    theirs.load_state_dict(to_hugging_face(weights, settings), strict=False)
    theirs.tie_weights()
    theirs.to(device)
    ours = model_from_weights(settings, weights).to(device)

    end = settings.vocab_size - 1
    prompts = torch.randint(end, (8, 32), generator=torch.Generator().manual_seed(1)).tolist()
    first = torch.tensor([prompts[0]], device=device)

    def peer(count: int) -> list[list[int]]:
        ids = {"eos_token_id": end, "pad_token_id": end}
        found = theirs.generate(
            first, attention_mask=torch.ones_like(first), max_new_tokens=count, do_sample=False, **ids
        )
        return [found[0, first.shape[1] :].tolist()]

    def our(texts: list[list[int]]) -> Callable[[int], list[list[int]]]:
        return lambda count: continue_tokens(ours, texts, GenerateSettings(max_tokens=count, temperature=0), end)

    rows = {"transformers": peer, "ours": our(prompts[:1]), "ours, 8 prompts": our(prompts)}
    texts: list[list[int]] = []
    for label, generate in rows.items():
        generate(4)  # warm-up
        made: list[list[int]] = []
        taken = seconds(lambda generate=generate, made=made: made.extend(generate(count)), device)  # type: ignore[misc]
        texts.append(made[0])
        yield {
            "generating": label,
            "new tokens": sum(map(len, made)),
            "tokens/s": sum(map(len, made)) / taken,
            "first text as transformers'": "yes" if made[0] == texts[0] else "no",
        }
