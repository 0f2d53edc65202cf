"""Collect the word n-grams of evaluation sets, find them in texts, and cut them out.

    ngrams = read_ngrams([Path("lambada.jsonl")], DecontaminateSettings(files=["lambada.jsonl"]))
    ngrams.find(words(text))                  # [(index of the first word, number of the n-gram), …]
    matches = find_matches(text, ngrams, ignored)         # [(number of the n-gram, its span), …]
    pieces(text, [span for _, span in matches], settings) # what is left

Words are those of corpus.text.words. An item of an evaluation set contributes all its 13-grams; a
shorter one of 8 words or more is one n-gram. In scripts without spaces a word is a character, and
an n-gram has as many characters as 13 or 8 words are worth. Texts are searched by 64-bit hashes of
n-grams, vectorised; each match is then compared word by word.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from xxhash import xxh3_64_intdigest

from common.errors import InputError
from common.files import expand_inputs, read_json, read_lines
from common.settings import DecontaminateSettings
from corpus.text.words import WHOLE, spans, words, worth

_FORM = "2"  # version of the form of words: another makes other n-grams of the same sets
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplication modulo 2**64 is invertible

# . ! ? and their equivalents in other scripts; Thai and Lao separate sentences by a space
_SENTENCE_END = re.compile(r"[.!?。．｡！？।॥؟۔։።།။។]|(?<=[\u0e00-\u0eff])\s")


def _hashes(of: Sequence[str]) -> npt.NDArray[np.uint64]:
    return np.fromiter((xxh3_64_intdigest(word.encode()) for word in of), dtype=np.uint64, count=len(of))


def _windows(hashes: npt.NDArray[np.uint64], length: int) -> npt.NDArray[np.uint64]:
    """Hash of each run of `length` words: a polynomial of their hashes modulo 2**64."""
    total = np.zeros(max(0, len(hashes) - length + 1), dtype=np.uint64)
    for offset in range(length):
        total = total * _BASE + hashes[offset : offset + len(total)]
    return total


@dataclass(frozen=True)
class Ngrams:
    """The n-grams of some evaluation sets, numbered in sorted order."""

    texts: list[str]
    """Words of each n-gram, separated by spaces."""
    sets: dict[str, npt.NDArray[np.int64]]
    """Numbers of the n-grams per evaluation set."""
    tables: dict[int, tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]]
    """Per length in words: sorted hashes, and the number of each one's n-gram."""

    @property
    def digest(self) -> str:
        """Identifies this collection, so that counts of another one are refused."""
        return hashlib.sha256("\n".join([_FORM, *self.texts]).encode()).hexdigest()[:16]

    def find(self, text: Sequence[str]) -> list[tuple[int, int]]:
        """(index of the first word, number of the n-gram) of each occurrence in a text's words."""
        hashes = _hashes(text)
        occurrences = []
        for length, (known, numbers) in self.tables.items():
            windows = _windows(hashes, length)
            nearest = np.minimum(np.searchsorted(known, windows), len(known) - 1)
            for index in np.flatnonzero(known[nearest] == windows).tolist():
                number = int(numbers[nearest[index]])
                if self.texts[number] == " ".join(text[index : index + length]):
                    occurrences.append((index, number))
        return sorted(occurrences)


def read_ngrams(paths: Sequence[Path], settings: DecontaminateSettings) -> Ngrams:
    """The n-grams of evaluation sets, one file each: JSON lines, or one item per line.

    Every string in a JSON line is an item. Raises InputError for a file that is missing, is
    damaged, or has no item of enough words.
    """
    members: dict[str, set[str]] = {}
    for path in paths:
        members[str(path)] = {ngram for item in _items(path) for ngram in _ngrams_of(words(item), settings)}
        if not members[str(path)]:
            chinese = -(-3 * settings.min_words // 2)
            raise InputError(
                f"{path}: no item of {settings.min_words} words or more (in Chinese: {chinese} characters); "
                "is it an evaluation set?"
            )
    texts = sorted(set().union(*members.values()))
    number_of = {text: number for number, text in enumerate(texts)}
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, text in enumerate(texts):
        by_length[text.count(" ") + 1].append(number)
    tables = {}
    for length, numbers in sorted(by_length.items()):
        hashes = np.array([_windows(_hashes(texts[number].split(" ")), length)[0] for number in numbers])
        order = np.argsort(hashes)
        tables[length] = hashes[order], np.array(numbers, dtype=np.int64)[order]
    sets = {name: np.array(sorted(number_of[text] for text in ngrams)) for name, ngrams in members.items()}
    return Ngrams(texts, sets, tables)


def _ngrams_of(item: Sequence[str], settings: DecontaminateSettings) -> Iterator[str]:
    """The n-grams of an item: words that are worth `max_words`; a short item is one n-gram."""
    ends = np.cumsum([0, *map(worth, item)])  # what the words before each index are worth
    if ends[-1] < settings.min_words * WHOLE:
        return
    if ends[-1] <= settings.max_words * WHOLE:
        yield " ".join(item)
        return
    for start, before in enumerate(ends.tolist()):
        end = int(np.searchsorted(ends, before + settings.max_words * WHOLE))
        if end == len(ends):
            return
        yield " ".join(item[start:end])


def _items(path: Path) -> Iterator[str]:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.startswith((b"{", b"[")):
            yield line.decode("utf-8", "replace")
            continue
        try:
            yield from _strings(orjson.loads(line))
        except orjson.JSONDecodeError:
            raise InputError(f"{path}:{number}: begins like JSON but is not JSON; mend or remove the line") from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


# ---------------------------------------------------------------- cutting


def ngrams_of(settings: DecontaminateSettings) -> Ngrams:
    """The n-grams of the evaluation sets of some settings, read once per process."""
    return _ngrams_of_json(settings.model_dump_json())


@lru_cache(1)
def _ngrams_of_json(settings: str) -> Ngrams:
    parsed = DecontaminateSettings.model_validate_json(settings)
    return read_ngrams(expand_inputs(parsed.files, "lists"), parsed)


def sum_counts(counts: Iterable[Path], digest: str | None = None) -> tuple[str, Counter[int]]:
    """The digest of the counted n-grams, and the sum of the counts of each in all files.

    Raises InputError for counts of other n-grams than those of `digest`, or of the first file.
    """
    total: Counter[int] = Counter()
    for path in counts:
        verb = "sum" if path.name == "counts.json" else "count"
        values = read_json(path, f"delete it and run `corpus.decontaminate {verb}` again")
        if not isinstance(values, dict) or values.get("ngrams") != (digest := digest or values.get("ngrams") or "none"):
            raise InputError(f"{path}: not counted with these evaluation sets; run `corpus.decontaminate count` again")
        total.update({int(number): times for number, times in values["counts"].items()})
    return digest or "", total


def find_matches(text: str, ngrams: Ngrams, ignored: frozenset[int]) -> list[tuple[int, tuple[int, int]]]:
    """(number, (start, end) in the text) of each n-gram in a text, except the ignored ones."""
    occurrences = [(index, number) for index, number in ngrams.find(words(text)) if number not in ignored]
    of_words = spans(text) if occurrences else []
    matches = []
    for index, number in occurrences:
        last = index + ngrams.texts[number].count(" ")
        matches.append((number, (of_words[index][0], of_words[last][1])))
    return matches


def pieces(text: str, cut: Iterable[tuple[int, int]], settings: DecontaminateSettings) -> list[str]:
    """What is left of a text without spans (start, end), given in order, and the text around."""
    left: list[str] = []
    start = 0  # of the text that is not yet kept or cut
    for first, last in cut:
        end = first - settings.cut_characters - 1
        while end > start and not _SENTENCE_END.match(text, end):
            end -= 1
        if end > start:
            left.append(text[start : end + 1])
        sentence_end = _SENTENCE_END.search(text, max(start - 1, last + settings.cut_characters))
        start = sentence_end.end() if sentence_end else len(text)
    left.append(text[start:])
    return [piece.strip() for piece in left if len(piece.strip()) > settings.min_characters]
