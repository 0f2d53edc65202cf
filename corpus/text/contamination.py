"""Find the n-grams of evaluation sets in texts, and cut them out with the text around them.

    ngrams = ngrams_of(settings.model_dump_json())
    matches = find_matches(text, ngrams, ignored)         # the numbers of the n-grams, and their spans
    pieces(text, matches.spans, settings)                 # what is left

The recipe is Megatron-LM's: see corpus.decontaminate.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from common.errors import InputError
from common.files import expand_inputs, read_json
from common.settings import DecontaminateSettings
from corpus.text.ngrams import Ngrams, read_ngrams
from corpus.text.words import spans, words

# . ! ? and their equivalents in other scripts; Thai and Lao separate sentences by a space
_SENTENCE_END = re.compile(r"[.!?。．｡！？।॥؟۔։።།။។]|(?<=[\u0e00-\u0eff])\s")


@dataclass(frozen=True)
class Matches:
    """The n-grams found in a text, in order."""

    numbers: list[int]
    spans: list[tuple[int, int]]
    """Where each of them lies in the text: (start, end)."""


@lru_cache(1)
def ngrams_of(settings: str) -> Ngrams:
    """The n-grams of the evaluation sets of `settings` (JSON), read once per process."""
    parsed = DecontaminateSettings.model_validate_json(settings)
    return read_ngrams(expand_inputs(parsed.files, "lists"), parsed)


def sum_counts(counts: Iterable[Path], digest: str | None = None) -> tuple[str, Counter[int]]:
    """The digest of the counted n-grams, and how often each of them occurs, summed over files of counts.

    Raises InputError for counts of other n-grams: other than those of `digest`, or of the first file.
    """
    total: Counter[int] = Counter()
    for path in counts:
        found = read_json(path)
        if not isinstance(found, dict) or found.get("ngrams") != (digest := digest or found.get("ngrams") or "none"):
            raise InputError(f"{path}: not counted with these evaluation sets; run `corpus.decontaminate count` again")
        total.update({int(number): times for number, times in found["counts"].items()})
    return digest or "", total


def frequent_ngrams(counts: Iterable[Path], ngrams: Ngrams, max_count: int) -> frozenset[int]:
    """The numbers of n-grams that occur `max_count` times or more, summed over files of counts: ordinary language.

    Raises InputError for counts of other n-grams.
    """
    _, total = sum_counts(counts, ngrams.digest)
    return frozenset(number for number, times in total.items() if times >= max_count)


def find_matches(text: str, ngrams: Ngrams, ignored: frozenset[int]) -> Matches:
    """Where n-grams of the evaluation sets occur in a text, except the ignored ones."""
    found = [(index, number) for index, number in ngrams.find(words(text)) if number not in ignored]
    if not found:
        return Matches([], [])
    of_words = spans(text)
    lasts = [index + ngrams.texts[number].count(" ") for index, number in found]
    return Matches(
        [number for _, number in found],
        [(of_words[index][0], of_words[last][1]) for (index, _), last in zip(found, lasts, strict=True)],
    )


def pieces(text: str, cut: Iterable[tuple[int, int]], settings: DecontaminateSettings) -> list[str]:
    """What is left of a text without some spans (start, end), given in order, and without what surrounds them."""
    left: list[str] = []
    start = 0  # of the text that is not yet kept or cut
    for first, last in cut:
        end = first - settings.cut_characters - 1
        while end > start and not _SENTENCE_END.match(text, end):
            end -= 1
        if end > start:
            left.append(text[start : end + 1])
        found = _SENTENCE_END.search(text, max(start - 1, last + settings.cut_characters))
        start = found.end() if found else len(text)
    left.append(text[start:])
    return [piece.strip() for piece in left if len(piece.strip()) > settings.min_characters]
