"""Continue texts with a trained model, one sampled token at a time.

model, tokenizer = load_model(Path("results/demo/merged/tiny"))
(text,) = generate(model, tokenizer, ["The list of"], GenerateSettings(max_tokens=64))
"""

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from torch import Generator, Tensor

from common.errors import InputError
from common.settings import GenerateSettings
from common.tokenizer import Tokenizer
from common.workers import batched
from training.inference.kv_cache import kv_cache
from training.model import GPT2

Show = Callable[[str], None]
"""Called with a batch's first text after each of its tokens: a prefix of the final text."""

_SEEDS = 2**64
_BATCH = 8  # texts per batch; at 124M a text of 1,024 tokens keeps 75 MB of keys and values


def sample_token(logits: Tensor, options: GenerateSettings, generator: Generator) -> int:
    """One token id from logits (V,): the likeliest at temperature 0, else from top k and top p."""
    if options.temperature == 0:
        return int(logits.argmax())
    ids = torch.arange(len(logits))
    if options.top_k:  # selecting before sorting is faster than sorting everything; ties at the k-th keep their order
        ids = (logits >= logits.topk(min(options.top_k, len(logits))).values[-1]).nonzero()[:, 0]
    ordered, order = logits[ids].double().sort(descending=True, stable=True)
    ordered = (ordered - ordered[0]) / options.temperature  # at most 0, so that no temperature overflows softmax
    if options.top_k:
        ordered, order = ordered[: options.top_k], order[: options.top_k]
    probabilities = ordered.softmax(dim=0)
    before = probabilities.cumsum(dim=0) - probabilities  # total probability of all more likely tokens
    probabilities[before >= options.top_p] = 0.0  # the most likely token always stays
    return int(ids[order[torch.multinomial(probabilities, 1, generator=generator)]])


def penalise_repetition(logits: Tensor, text: Sequence[int], penalty: float) -> Tensor:
    """Logits (V,), lower for tokens in `text` (Keskar et al. 2019, section 4.1)."""
    if penalty == 1 or not text:
        return logits
    seen = torch.tensor(sorted(set(text)))
    lowered = logits[seen]
    return logits.index_copy(0, seen, torch.where(lowered < 0, lowered * penalty, lowered / penalty))


def continue_tokens(
    model: GPT2,
    prompts: Sequence[Sequence[int]],
    options: GenerateSettings,
    end_of_text: int,
    seeds: Sequence[int] | None = None,
    goes_on: Callable[[int, int], bool] = lambda row, token: True,
    vocab_size: int | None = None,
) -> list[list[int]]:
    """The continuation of each prompt, at most `max_tokens` tokens, computed as one batch.

    `goes_on` gets each token with the number of its prompt; if it returns False, that is the last
    token of its text. An empty prompt begins with an end-of-text, which training texts follow; any
    other stands alone, as in transformers. Ids from `vocab_size` on are never chosen. A text
    depends on its own seed (default `options.seed`), not on the rest of the batch.
    """
    texts = [list(prompt) or [end_of_text] for prompt in prompts]
    starts = list(map(len, texts))
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or [options.seed] * len(prompts)]
    growing = list(range(len(prompts)))
    with kv_cache(model, len(prompts), max(starts) + options.max_tokens) as next_logits:
        for _ in range(options.max_tokens):
            logits = next_logits({row: texts[row] for row in growing}).cpu()
            ended = set()
            for row, scores in zip(growing, logits, strict=True):
                scores = penalise_repetition(scores, texts[row], options.repetition_penalty)
                token = sample_token(scores[:vocab_size], options, generators[row])
                if token != end_of_text:
                    texts[row].append(token)
                if token == end_of_text or not goes_on(row, token):
                    ended.add(row)
            growing = [row for row in growing if row not in ended]
            if not growing:
                break
    return [text[start:] for text, start in zip(texts, starts, strict=True)]


def sample_seed(options: GenerateSettings, sample: int) -> int:
    """The seed of a prompt's `sample`-th text, counted from 0."""
    return (options.seed + sample) % _SEEDS


def generate(
    model: GPT2,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    options: GenerateSettings,
    samples: int = 1,
    show: Show | None = None,
) -> Iterator[str]:
    """Yield `samples` texts per prompt, prompt by prompt: the prompt and its continuation.

    Raises InputError before anything is computed if a prompt does not fit the model's context.
    """
    encoded = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    room = model.settings.seq_len
    for number, tokens in enumerate(encoded, start=1):
        if unknown := [token for token in tokens if token >= model.settings.vocab_size]:
            text = tokenizer.decode(unknown[:1])
            raise InputError(
                f"prompt {number}: {text!r} has id {unknown[0]}, and the model has no row for it; leave it out"
            )
        if len(tokens) > room:
            raise InputError(f"prompt {number}: {len(tokens):,} tokens, the model has room for {room:,}; shorten it")
    requests = [
        (prompt, tokens, sample_seed(options, sample))
        for prompt, tokens in zip(prompts, encoded, strict=True)
        for sample in range(samples)
    ]
    texts = (_generate_batch(model, tokenizer, batch, options, show) for batch in batched(requests, _BATCH))
    return chain.from_iterable(texts)


def _generate_batch(
    model: GPT2,
    tokenizer: Tokenizer,
    batch: Sequence[tuple[str, list[int], int]],
    options: GenerateSettings,
    show: Show | None,
) -> list[str]:
    """The texts of some prompts, each given with its tokens and the seed of its text."""
    prompts, tokens, seeds = zip(*batch, strict=True)
    stops = [stop.encode() for stop in options.stop]
    continuations = [b""] * len(batch)

    def goes_on(row: int, token: int) -> bool:
        continuations[row] += tokenizer.vocabulary.tokens[token]
        decided, ends = decided_bytes(continuations[row], stops)
        if ends:
            continuations[row] = continuations[row][:decided]
        if show and row == 0:  # without the first bytes of a character that is not complete
            show(prompts[0] + getincrementaldecoder("utf-8")("replace").decode(continuations[0][:decided]))
        return not ends

    continue_tokens(model, tokens, options, tokenizer.end_of_text, seeds, goes_on, tokenizer.vocab_size)
    return [prompt + text.decode("utf-8", "replace") for prompt, text in zip(prompts, continuations, strict=True)]


def decided_bytes(text: bytes, stops: Sequence[bytes]) -> tuple[int, bool]:
    """The number of bytes that no later stop string can remove, and whether the text ends there."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    if ends:
        return min(ends), True
    begun = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return len(text) - max(begun, default=0), False
