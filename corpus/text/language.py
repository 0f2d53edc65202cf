"""Detect the language of a text: by script, by CLD2 if one language leads, else by langdetect.

    language_of("Der Hund lief durch den Wald …")        # Language(code="de", score=0.99)

All work offline and are deterministic, in any order and process. The published recipe uses
langdetect; CLD2 is thirty times as fast, and they agree on texts in which one language leads: see
docs/benchmarks.md, Cleaning.
"""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import orjson

from corpus.text.words import CHINESE_WORTH, SPACELESS_WORTH, WHOLE

if TYPE_CHECKING:
    from langdetect import DetectorFactory

# three windows are the 10,000 characters that langdetect reads; it would read only the first ones
_WINDOW = 3_333
# Share of the characters. On half-translated manuals, a lead of 0.2 leaves 15 % of the texts to
# langdetect and decides 0.9 % differently; 0.3: 19 and 0.5 %; 0.4: 24 and 0.13 %. Each leaves few
# real pages to langdetect.
_LEAD = 0.3
_ADDRESS = re.compile(r"https?://\S+|(?<!\S)\S+@\S+")  # langdetect ignores them, too
# Scripts of one language, without spaces between words or, in Korean, with few
_SCRIPTS = {
    "zh": "\u3005\u3007\u3400-\u9fff\uf900-\ufaff\U00020000-\U000323af",
    "ja": "\u3041-\u30fa\u30fc-\u30ff",
    "ko": "\u1100-\u11ff\uac00-\ud7a3",
    "th": "\u0e00-\u0e7f",
    "lo": "\u0e80-\u0eff",
    "my": "\u1000-\u109f",
    "km": "\u1780-\u17ff",
}
_ANY_SCRIPT = re.compile(f"[{''.join(_SCRIPTS.values())}]+")
_LETTERS_OF = {code: re.compile(rf"[{script}](?<![\W\d])") for code, script in _SCRIPTS.items()}  # without vowel signs
_LETTERS = re.compile(r"[^\W\d_]+")
_SAME = {"iw": "he", "jw": "jv", "nb": "no"}  # older or narrower codes


def sample(text: str) -> str:
    """Beginning, middle and end of a long text; up to 10,000 characters, the text itself."""
    if len(text) <= 3 * _WINDOW:
        return text
    middle = (len(text) - _WINDOW) // 2
    return "\n".join((text[:_WINDOW], text[middle : middle + _WINDOW], text[-_WINDOW:]))


class Language(NamedTuple):
    """A detected language; both fields are empty for a text without letters."""

    code: str
    """ISO 639-1."""
    score: float
    """0 to 1: the share of the text in this language, or langdetect's probability."""


NONE = Language("", 0.0)


def language_of(text: str) -> Language:
    """The main language of a text; `NONE` for a text without letters."""
    part = sample(text)
    words = _ADDRESS.sub(" ", part)
    code, score = script_language(words) or clear_language(words) or thorough_language(part)
    code = code.partition("-")[0]  # zh-Hant, zh-cn
    return Language(_SAME.get(code, code), round(score, 2))


def script_language(text: str) -> Language | None:
    """The language of a script that carries more of a text than words in other scripts, or None.

    Characters have the worth of `corpus.text.words`: 1.5 Chinese characters or 2.5 others carry as
    much as a word. That fits Korean, too: in translated program messages, a syllable replaces 2.0
    Latin letters.
    """
    if not (characters := "".join(_ANY_SCRIPT.findall(text))):
        return None
    counts = {code: len(letters.findall(characters)) for code, letters in _LETTERS_OF.items()}
    worth = {code: count * (CHINESE_WORTH if code == "zh" else SPACELESS_WORTH) for code, count in counts.items()}
    japanese = counts["ja"] > counts["zh"] / 5
    worth["ja" if japanese else "zh"] += worth.pop("zh" if japanese else "ja")
    others = WHOLE * len(_LETTERS.findall(_ANY_SCRIPT.sub(" ", text)))
    code, total = max(worth, key=worth.__getitem__), sum(worth.values()) + others
    return Language(code, worth[code] / total) if total > 2 * others else None


def clear_language(text: str) -> Language | None:
    """CLD2's language that leads by 0.3 of the characters in its spans and its summary, or None.

    Both, because one span may give an English text to Danish, and the summary 90 % to English.
    """
    import pycld2

    encoded = text.encode("utf-8", "replace")
    try:
        reliable, _, summary, spans = pycld2.detect(encoded, returnVectors=True)
    except pycld2.error:  # it rejects code points that are not characters
        return None
    characters: Counter[str] = Counter()
    for start, size, _, code in spans:
        characters[code] += len(encoded[start : start + size].decode("utf-8", "ignore"))
    lead = _LEAD * characters.total()
    del characters["un"]  # spans in an unknown language
    (code, first), (_, second) = [*characters.most_common(2), ("", 0), ("", 0)][:2]
    (_, leader, share, _), (_, _, next_share, _) = summary[:2]
    clear = reliable and first - second >= lead and leader == code and share - next_share >= 100 * _LEAD
    return Language(code, share / 100) if clear else None


def thorough_language(text: str) -> Language:
    """langdetect's answer, seeded because it samples; `NONE` for a text without letters."""
    from langdetect import DetectorFactory, LangDetectException

    DetectorFactory.seed = 0
    detector = _profiles().create()
    detector.append(text)
    try:
        likeliest = detector.get_probabilities()
    except LangDetectException:
        return NONE
    return Language(likeliest[0].lang, likeliest[0].prob) if likeliest else Language("unknown", 0.0)


@cache
def _profiles() -> "DetectorFactory":
    """langdetect's profiles. Its own loader swallows all exceptions, and then loads only some."""
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
    from langdetect.utils.lang_profile import LangProfile

    factory, paths = DetectorFactory(), sorted(Path(PROFILES_DIRECTORY).iterdir())
    for index, path in enumerate(paths):
        factory.add_profile(LangProfile(**orjson.loads(path.read_bytes())), index, len(paths))
    return factory
