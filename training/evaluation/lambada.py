"""How often a model predicts the last word of a text: LAMBADA (Paperno et al. 2016).

    result = last_word_accuracy(model, read_examples(Path("lambada_test.jsonl"), tokenizer, model.settings.seq_len))

Each line of the file is `{"text": "…"}`. The text is split at its last white space; the last word is encoded with a
leading space, as in running text. It is correct if each of its tokens is the most likely one after the true tokens
before it (Megatron-LM's `--strict-lambada`). The perplexity is exp of the mean loss per word.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from common.errors import InputError
from common.files import read_lines, read_object
from common.progress import Meter
from common.tokenizer import Tokenizer
from common.workers import batched
from training.evaluation.scoring import logits_at, perplexity
from training.model import GPT2

_BATCH = 32  # texts per forward pass


class Example(NamedTuple):
    """A text as tokens, its last word at the end."""

    tokens: npt.NDArray[np.int64]
    """(T + 1,), T at most seq_len: longer texts are cut off at the front."""
    word: int
    """Number of tokens of the last word."""


def read_examples(path: Path, tokenizer: Tokenizer, seq_len: int) -> list[Example]:
    """The texts of a JSON-lines file. Raises InputError for a line without at least two words."""
    examples = []
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}:{number}"
        document = read_object(line, where, ["text"])
        if isinstance(document, str):
            raise InputError(f"{where}: {document}")
        text = document["text"]
        words = text.split()
        if len(words) < 2:
            raise InputError(f"{where}: {'one word' if words else 'an empty text'}; the last word needs others before")
        context = tokenizer.encode(text.rstrip().removesuffix(words[-1]).strip())
        word = tokenizer.encode(" " + words[-1])
        if len(word) > seq_len:
            raise InputError(
                f"{where}: the last word has {len(word)} tokens, more than the model's context of {seq_len}"
            )
        examples.append(Example(np.concatenate([context, word])[-seq_len - 1 :].astype(np.int64), len(word)))
    if not examples:
        raise InputError(f"{path}: no texts")
    return examples


@torch.no_grad()
def last_word_accuracy(model: GPT2, examples: list[Example]) -> dict[str, Any]:
    """The share of last words that the model predicts, and their perplexity."""
    device = next(model.parameters()).device
    total, correct = torch.zeros((), dtype=torch.float64, device=device), 0
    longest_first = sorted(examples, key=lambda example: -len(example.tokens))  # so that a batch needs little padding
    with Meter("evaluate", "texts", len(examples)) as meter:
        for batch in batched(longest_first, _BATCH):
            tokens = torch.zeros(len(batch), len(batch[0].tokens), dtype=torch.long)  # padding is never scored
            scored = torch.zeros_like(tokens, dtype=torch.bool)
            for row, example in enumerate(batch):
                size = len(example.tokens)
                tokens[row, :size] = torch.from_numpy(example.tokens)
                scored[row, size - example.word : size] = True
            tokens, scored = tokens.to(device), scored.to(device)
            logits, targets = logits_at(model, tokens[:, :-1], scored[:, 1:]), tokens[scored]
            total += F.cross_entropy(logits, targets, reduction="sum").double()
            predicted = (logits.argmax(-1) == targets).cpu().numpy()
            ends = np.cumsum([example.word for example in batch])[:-1]
            correct += sum(bool(word.all()) for word in np.split(predicted, ends))
            meter.advance(len(batch))
    return {
        "accuracy": correct / len(examples),
        "perplexity": perplexity(float(total) / len(examples)),
        "correct": correct,
        "words": len(examples),
        "tokens": sum(example.word for example in examples),
    }


def summary(result: dict[str, Any]) -> str:
    """A result in one line."""
    return (
        f"last-word accuracy {result['accuracy']:.2%} ({result['correct']:,} of {result['words']:,}), "
        f"perplexity {result['perplexity']:.2f} per word"
    )
