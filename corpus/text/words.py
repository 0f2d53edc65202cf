"""Split a text into words as decontamination and deduplication compare them, and locate them.

    words("Don't STOP: ｆｕｌｌ ﬁn")           # ["don", "t", "stop", "full", "fin"]
    words("东京 2020")                       # ["东", "京", "2020"]
    spans("Don't STOP")                      # [(0, 3), (4, 5), (6, 10)]

A word is a run of letters, digits and underscores, folded by Unicode's NFKC_Casefold: composed and
decomposed, full-width and ligature forms are equal, ß is ss, and soft hyphens and other invisible
code points are removed. i with and without its dot are equal, too (Turkish). Accents and vowel
signs belong to their words. In scripts that are written without spaces, every character with its
marks is a word: see `SPACELESS`.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

WORD = re.compile(r"\w+")

# (first, last) code points of scripts without spaces between words, after folding
SPACELESS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x1950, 0x19DF),  # Tai Le, New Tai Lue
    (0x1A20, 0x1AAF),  # Tai Tham
    (0x1B00, 0x1B7F),  # Balinese
    (0x2E80, 0x2FDF),  # radicals of Chinese characters
    (0x3005, 0x3007),  # 々, 〆, 〇
    (0x3021, 0x312F),  # numerals, hiragana, katakana, bopomofo
    (0x31A0, 0x31FF),  # more of these
    (0xA000, 0xA4CF),  # Yi
    (0xA980, 0xA9FF),  # Javanese, Burmese
    (0xAA60, 0xAADF),  # Burmese, Tai Viet
    (0x16FE0, 0x18DFF),  # Tangut and others
    (0x1AFF0, 0x1B2FF),  # more kana, Nushu
)
# Code points that may need folding; Chinese characters and composed Korean syllables never do.
_CODE_POINTS = (*range(0x3400), *range(0xA000, 0xAC00), *range(0xD7A4, 0x20000), *range(0x2F800, 0x2FA20))
_JAMO = range(0x1160, 0x1200)  # vowels and final consonants of Korean: they join the one before
# Default_Ignorable_Code_Point of Unicode's DerivedCoreProperties.txt
_INVISIBLE = (
    (0x00AD, 0x00AD),
    (0x034F, 0x034F),
    (0x061C, 0x061C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFF8),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE0FFF),
)


_SELECTORS = (0xE0100, 0xE01EF)  # variation selectors: marks among the last of _INVISIBLE
_LAST_SMALL, _LARGE = "\uffff", re.compile("[\U00010000-\U0010ffff]")
# An English word is worth 1.5 Chinese characters, or 2.5 of other scripts without spaces
WHOLE, CHINESE_WORTH, SPACELESS_WORTH = 15, 10, 6
_CHINESE = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0x20000, 0x3FFFF))


def _ranges(ranges: Iterable[tuple[int, int]]) -> str:
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


def _class(characters: Iterable[str]) -> str:
    """The body of a regex character class, given its characters in order."""
    ranges: list[list[int]] = []
    for code in map(ord, characters):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return _ranges((first, last) for first, last in ranges)


_HAN = re.compile(f"[々〇{_ranges(_CHINESE)}]")
_REMOVED = re.compile(f"[{_ranges(_INVISIBLE)}]+")


def _fold(text: str) -> str:
    """NFKC_Casefold (Unicode Standard, section 3.13), and i without its dot."""
    text = unicodedata.normalize("NFD", _REMOVED.sub("", text)).casefold()
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return text.replace("i\u0307", "i").replace("ı", "i")


@dataclass(frozen=True)
class _Patterns:
    """Patterns for the Unicode version of this Python."""

    special: re.Pattern[str]
    """A character that `str.casefold` does not fold alone, or that joins the one before it."""
    cluster: re.Pattern[str]
    """A character with those that join it: a text's clusters can be folded one by one."""
    unit: re.Pattern[str]
    """A word of a folded text, in any script."""
    beyond: re.Pattern[str]
    """A character whose word `WORD` does not find."""


@cache
def _classes() -> dict[str, list[str]]:
    """Classes of characters, computed (0.2 s) at the first text that is not ASCII."""
    classes: dict[str, list[str]] = {name: [] for name in ("mark", "joins", "changes", "spaceless")}
    without_spaces = re.compile(f"[{_ranges(SPACELESS)}]")
    for character in map(chr, _CODE_POINTS):
        first = unicodedata.normalize("NFKD", character)[0]
        if unicodedata.category(character)[0] == "M":
            classes["mark"].append(character)
        if unicodedata.category(first)[0] == "M" or ord(first) in _JAMO or _REMOVED.match(character):
            classes["joins"].append(character)
        elif len(folded := character.casefold()) != 1 or _fold(character) != folded:
            classes["changes"].append(character)
        if character.isalnum() and without_spaces.match(character):
            classes["spaceless"].append(character)
    return classes


@cache
def _compiled(last: str) -> _Patterns:
    """The patterns for texts with characters up to `last`: small classes are searched faster."""
    classes = {name: [character for character in own if character <= last] for name, own in _classes().items()}
    mark, joins, changes, own = map(_class, classes.values())
    own += _ranges(_CHINESE[:2])
    if last > _LAST_SMALL:
        mark, joins, own = mark + _ranges([_SELECTORS]), joins + _ranges(_INVISIBLE[-1:]), own + _ranges(_CHINESE[2:])
    return _Patterns(
        special=re.compile(f"[{changes}{joins}]"),
        cluster=re.compile(f"[^{joins}][{joins}]*|[{joins}]+"),
        unit=re.compile(rf"[{own}][{mark}]*|[^\W{own}]+(?:[{mark}]+[^\W{own}]*)*"),
        beyond=re.compile(f"[{own}{mark}]"),
    )


def _patterns(text: str) -> _Patterns:
    return _compiled("\U0010ffff" if _LARGE.search(text) else _LAST_SMALL)


def fold(text: str) -> str:
    """A text as it is compared: NFKC_Casefold, and i without its dot."""
    if text.isascii():
        return text.lower()
    return _fold(text) if _patterns(text).special.search(text) else text.casefold()


def words(text: str) -> list[str]:
    """The words of a text as they are compared."""
    folded = fold(text)
    return _pattern(folded).findall(folded)


def _pattern(folded: str) -> re.Pattern[str]:
    """The pattern that finds the words of a folded text."""
    if folded.isascii():
        return WORD
    return _patterns(folded).unit if _patterns(folded).beyond.search(folded) else WORD


def worth(word: str) -> int:
    """The weight of a word, in fifteenths of an English word: see docs/corpus.md."""
    if word.isascii() or not _compiled("\U0010ffff").beyond.match(word):
        return WHOLE
    return CHINESE_WORTH if _HAN.match(word) else SPACELESS_WORTH


def spans(text: str) -> list[tuple[int, int]]:
    """(start, end) in the text of each of `words(text)`."""
    if text.isascii():
        return [match.span() for match in WORD.finditer(text)]
    cluster = _patterns(text).cluster
    ends = np.fromiter((match.end() for match in cluster.finditer(text)), dtype=np.int64)
    parts = [_fold_cluster(match[0]) for match in cluster.finditer(text)]
    folded, folded_ends = "".join(parts), np.cumsum([len(part) for part in parts])
    matches = np.array([match.span() for match in _pattern(folded).finditer(folded)], dtype=np.int64).reshape(-1, 2)
    first = np.searchsorted(folded_ends, matches[:, 0], side="right")  # the cluster where it begins
    last = np.searchsorted(folded_ends, matches[:, 1], side="left")
    return list(zip(np.concatenate([[0], ends])[first].tolist(), ends[last].tolist(), strict=True))


_fold_cluster = lru_cache(1 << 16)(_fold)
