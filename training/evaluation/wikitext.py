r"""Perplexity a word on WikiText, by the published definition: figures that can be laid beside those of papers.

    result = word_perplexity(model, tokenizer, read_text(Path("wiki.test.tokens")), stride=32)

WikiText is written in words: `1 @,@ 000 km ( 600 mi ) , " so "`. Three things make its figures comparable (Radford et
al. 2019, section 3.1; Shoeybi et al. 2019, section 5.3):

- the text is written as people write it first (`detokenized`), for a GPT-2 has never seen the other;
- windows overlap: each begins `stride` tokens after the one before and scores what that one did not reach;
- the loss is shared out over the words of the text as it came, not over tokens:

      word perplexity = exp(loss x token ratio),  token ratio = (tokens - 1) / (words - 1)

  where a line end counts as a word, as in the papers that count it as `<eos>`.
"""

import re
from pathlib import Path
from typing import Any

from common.errors import InputError
from common.files import read_blocks
from common.tokenizer import Tokenizer
from training.evaluation.scoring import perplexity, sum_of_sliding_losses
from training.model import GPT2

# In this order, each over the whole text: the rules of Megatron-LM, which others have taken over.
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


def detokenized(text: str) -> str:
    """WikiText's words as people write them."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def count_words(text: str) -> int:
    """Words between white space, and the line ends between the first and the last of them."""
    return len(text.split()) + text.strip().count("\n")


def read_text(path: Path) -> str:
    """One file, decompressed by its suffix, every line end kept; InputError when it is not UTF-8."""
    try:
        return b"".join(read_blocks(path)).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 (byte {error.start}); convert it first") from None


def word_perplexity(model: GPT2, tokenizer: Tokenizer, path: Path, stride: int) -> dict[str, Any]:
    """Loss (nats) and perplexity a token, and perplexity a word, of a file of WikiText."""
    text = read_text(path)
    words, tokens = count_words(text), tokenizer.encode(detokenized(text))
    if words < 2 or len(tokens) < 2:
        raise InputError(f"{path}: fewer than two words to evaluate; choose another file")
    scored = len(tokens) - 1  # the first one has nothing before it
    loss = sum_of_sliding_losses(model, tokens, stride) / scored
    ratio = scored / (words - 1)
    return {
        "loss": loss,
        "perplexity": perplexity(loss),
        "word_perplexity": perplexity(loss * ratio),
        "token_ratio": ratio,
        "tokens": scored,
        "words": words,
        "stride": stride,
    }


def line(result: dict[str, Any]) -> str:
    """The result for people."""
    return (
        f"word perplexity {result['word_perplexity']:.2f}, token perplexity {result['perplexity']:.2f}, "
        f"{result['token_ratio']:.4f} tokens a word, {result['tokens']:,} tokens, {result['words']:,} words, "
        f"stride {result['stride']}"
    )
