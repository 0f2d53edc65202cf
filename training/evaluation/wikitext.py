r"""Word perplexity on WikiText by the published definition, so that the figures compare with those of papers.

    result = word_perplexity(model, tokenizer, Path("wiki.test.tokens"), stride=32)

WikiText is split into words: `1 @,@ 000 km ( 600 mi ) , " so "`. Three rules make figures comparable (Radford et al.
2019, section 3.1; Shoeybi et al. 2019, section 5.3):

- the text is detokenized first, because GPT-2 was trained on natural text;
- windows overlap: each begins `stride` tokens after the previous one and scores only the new tokens;
- the loss is divided by the number of words in the original text, not by tokens:

      word perplexity = exp(loss x token ratio),  token ratio = (tokens - 1) / (words - 1)

  where a line end counts as a word, as in the papers, which count it as `<eos>`.
"""

import math
import re
from pathlib import Path
from typing import Any

from common.errors import InputError
from common.files import read_text
from common.tokenizer import Tokenizer
from training.evaluation.scoring import perplexity, sum_of_sliding_losses
from training.model import GPT2

# Megatron-LM's rules, which other toolkits copied; each is applied to the whole text, in this order.
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("s '", "s'"),
        *((f" @{re.escape(mark)}@ ", mark) for mark in "-,."),
        *((f" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
        *(
            (rf"{re.escape(begin)}\s*([^{re.escape(end)}]*?)\s*{re.escape(end)}", rf"{begin}\1{end}")
            for begin, end in ("()", "[]", "{}", '""', "''")
        ),
        *((" ".join("=" * level), "=" * level) for level in (4, 3, 2)),
        (" ° ", "°"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" N ", " 1 "),
        (" 's", "'s"),
    )
]


def detokenize(text: str) -> str:
    """WikiText's words as natural text."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def count_words(text: str) -> int:
    """The number of words, plus the line ends between the first and the last word."""
    return len(text.split()) + text.strip().count("\n")


def word_perplexity(model: GPT2, tokenizer: Tokenizer, path: Path, stride: int) -> dict[str, Any]:
    """Loss (nats) and perplexity per token, perplexity per word and bits per byte of a WikiText file."""
    text = read_text(path)
    words, tokens = count_words(text), tokenizer.encode(detokenize(text))
    if words < 2 or len(tokens) < 2:
        raise InputError(f"{path}: fewer than two words to evaluate; choose another file")
    scored = len(tokens) - 1  # the first token has no context
    loss = sum_of_sliding_losses(model, tokens, stride) / scored
    ratio = scored / (words - 1)
    return {
        "loss": loss,
        "perplexity": perplexity(loss),
        "word_perplexity": perplexity(loss * ratio),
        "bits_per_byte": loss * scored / math.log(2) / len(text.encode()),  # of the file, as the words are
        "token_ratio": ratio,
        "tokens": scored,
        "words": words,
        "stride": stride,
    }


def summary(result: dict[str, Any]) -> str:
    """A result in one line."""
    return (
        f"word perplexity {result['word_perplexity']:.2f}, token perplexity {result['perplexity']:.2f}, "
        f"{result['token_ratio']:.4f} tokens per word, {result['tokens']:,} tokens, {result['words']:,} words, "
        f"stride {result['stride']}"
    )
