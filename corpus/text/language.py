"""Detect the language of a text: CLD2 decides the clear cases, langdetect the others.

    language_of("Der Hund lief durch den Wald …")        # "de"

Both work offline and are deterministic, in any order and process. The published recipe uses langdetect; CLD2 is thirty
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
# Of the characters. On half-translated manuals, a lead of 0.2 leaves 12 % of the texts to langdetect and decides 0.8 %
# differently; 0.3: 18 and 0.4 %; 0.4: 23 and 0.15 %. Each of them leaves few real pages to langdetect.
_LEAD = 0.3
_ADDRESS = re.compile(r"https?://\S+|\S+@\S+")  # langdetect ignores them, too
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
    code = clear_language(part) or thorough_language(part)
    code = code.partition("-")[0]  # zh-Hant, zh-cn
    return _SAME.get(code, code)


def clear_language(text: str) -> str:
    """CLD2's code of the language that leads the next one by 0.3 of the characters; "" if there is none."""
    import pycld2

    encoded = _ADDRESS.sub(" ", text).encode("utf-8", "replace")
    try:
        reliable, _, _, spans = pycld2.detect(encoded, returnVectors=True)
    except pycld2.error:  # it rejects code points that are not characters
        return ""
    characters: Counter[str] = Counter()
    for start, size, _, code in spans:
        characters[code] += len(encoded[start : start + size].decode("utf-8", "ignore"))
    lead = _LEAD * characters.total()
    del characters["un"]  # spans in an unknown language
    (code, first), (_, second) = [*characters.most_common(2), ("", 0), ("", 0)][:2]
    return code if reliable and first and first - second >= lead else ""


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
