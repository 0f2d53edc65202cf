"""Detect the language of a text: by script for Chinese, Japanese and Korean, by CLD2 if one language leads, else by
langdetect.

    language_of("Der Hund lief durch den Wald …")        # "de"

All work offline and are deterministic, in any order and process. The published recipe uses langdetect; CLD2 is thirty
times faster, and they agree on texts in which one language leads: see docs/benchmarks.md, Cleaning.
"""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from langdetect import DetectorFactory

# three windows are the 10,000 characters that langdetect reads; it would read only the first ones
_WINDOW = 3_333
# Of the characters. On half-translated manuals, a lead of 0.2 leaves 15 % of the texts to langdetect and decides 0.9 %
# differently; 0.3: 19 and 0.5 %; 0.4: 24 and 0.13 %. Each of them leaves few real pages to langdetect.
_LEAD = 0.3
_ADDRESS = re.compile(r"https?://\S+|(?<!\S)\S+@\S+")  # langdetect ignores them, too
_LETTER = re.compile(r"[^\W\d_]")
_HAN = re.compile("[\u3005\u3007\u3400-\u9fff\uf900-\ufaff\U00020000-\U000323af]")
_KANA = re.compile("[\u3041-\u30fa\u30fc-\u30ff]")
_HANGUL = re.compile("[\u1100-\u11ff\uac00-\ud7a3]")
_SAME = {"iw": "he", "jw": "jv", "nb": "no"}  # older or narrower codes


def sample(text: str) -> str:
    """Beginning, middle and end of a long text; up to 10,000 characters, the text itself."""
    if len(text) <= 3 * _WINDOW:
        return text
    middle = (len(text) - _WINDOW) // 2
    return "\n".join((text[:_WINDOW], text[middle : middle + _WINDOW], text[-_WINDOW:]))


def language_of(text: str) -> str:
    """ISO 639-1 code of the main language of a text; "" for a text without letters."""
    part = sample(text)
    words = _ADDRESS.sub(" ", part)
    code = script_language(words) or clear_language(words) or thorough_language(part)
    code = code.partition("-")[0]  # zh-Hant, zh-cn
    return _SAME.get(code, code)


def script_language(text: str) -> str:
    """zh, ja or ko if their characters carry more text than the other letters; "" if they do not.

    A Chinese character replaces 2.9 Latin letters in translations of program messages, a Korean one 2.0. Japanese, a
    quarter of it Chinese characters, replaces 1.6 to 1.75: kana count 1.3.
    """
    han, kana, hangul = (len(script.findall(text)) for script in (_HAN, _KANA, _HANGUL))
    found = han + kana + hangul
    if not found or 2.9 * han + 1.3 * kana + 2 * hangul <= len(_LETTER.findall(text)) - found:
        return ""
    return "ko" if hangul > han + kana else "ja" if kana > han / 5 else "zh"


def clear_language(text: str) -> str:
    """CLD2's code of the language that leads by 0.3 of the characters, both in its spans and in its summary, or "".

    One span may give an English text to Danish although the summary says 90 % English.
    """
    import pycld2

    encoded = text.encode("utf-8", "replace")
    try:
        reliable, _, summary, spans = pycld2.detect(encoded, returnVectors=True)
    except pycld2.error:  # it rejects code points that are not characters
        return ""
    characters: Counter[str] = Counter()
    for start, size, _, code in spans:
        characters[code] += len(encoded[start : start + size].decode("utf-8", "ignore"))
    lead = _LEAD * characters.total()
    del characters["un"]  # spans in an unknown language
    (code, first), (_, second) = [*characters.most_common(2), ("", 0), ("", 0)][:2]
    (_, leader, share, _), (_, _, next_share, _) = summary[:2]
    clear = reliable and first - second >= lead and leader == code and share - next_share >= 100 * _LEAD
    return code if clear else ""


def thorough_language(text: str) -> str:
    """langdetect's code; seeded, because it samples at random. "" for a text without letters."""
    from langdetect import DetectorFactory, LangDetectException

    DetectorFactory.seed = 0
    detector = _profiles().create()
    detector.append(text)
    try:
        return str(detector.detect())
    except LangDetectException:
        return ""


@cache
def _profiles() -> "DetectorFactory":
    """langdetect's profiles. Its own loader catches every exception, also a signal's, and goes on with half of them."""
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
    from langdetect.utils.lang_profile import LangProfile

    factory, paths = DetectorFactory(), sorted(Path(PROFILES_DIRECTORY).iterdir())
    for index, path in enumerate(paths):
        factory.add_profile(LangProfile(**orjson.loads(path.read_bytes())), index, len(paths))
    return factory
