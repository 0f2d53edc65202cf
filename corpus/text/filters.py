"""The rules that drop documents: small named objects that see the repaired text and say what they found, or nothing.

    next((f.name for f in filters(settings) if f.finding(text)), "keep")

OpenWebText's rules, and Gopher's quality rules (Rae et al. 2021, "Scaling Language Models", table A1), which are off by
default.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.settings import CleanSettings, GopherSettings
from corpus.text.language import language_of

_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_BULLETS = ("•", "‣", "-", "*")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Filter:
    """A named reason to drop a document."""

    name: str
    finding: Callable[[str], str | None]
    """What is wrong with a text, for people ("312 characters"); None keeps it."""


def filters(settings: CleanSettings) -> tuple[Filter, ...]:
    """The rules of a configuration in the order in which they are asked; the costly one last."""

    def javascript(text: str) -> str | None:
        short = len(text) < settings.javascript_characters
        return f"{len(text)} characters with 'javascript'" if short and "javascript" in text.lower() else None

    def language(text: str) -> str | None:
        code = language_of(text)
        return (code or "no letters") if code != settings.language else None

    return (
        Filter("empty", lambda text: None if text else "no text"),
        Filter("javascript", javascript),
        Filter("short", lambda text: f"{len(text)} characters" if len(text) < settings.min_characters else None),
        *(gopher(settings.gopher) if settings.gopher.enabled else ()),
        *([Filter("language", language)] if settings.language else ()),
    )


def gopher(settings: GopherSettings) -> Iterator[Filter]:
    """Gopher's quality rules; a word is what stands between white space, as in the paper."""

    def words(text: str) -> str | None:
        count = len(text.split())
        return None if settings.min_words <= count <= settings.max_words else f"{count} words"

    def word_length(text: str) -> str | None:
        found = [len(word) for word in text.split()]
        mean = sum(found) / max(len(found), 1)
        kept = settings.min_word_length <= mean <= settings.max_word_length
        return None if kept else f"words of {mean:.1f} characters"

    def symbols(text: str) -> str | None:
        count, among = max(text.count("#"), text.count("...") + text.count("…")), len(text.split())
        return f"{count} # or … in {among} words" if count > settings.max_symbols * among else None

    def lines(kind: str, matches: Callable[[str], bool], most: float) -> Callable[[str], str | None]:
        def finding(text: str) -> str | None:
            found = [matches(line.strip()) for line in text.split("\n") if line.strip()]
            return f"{sum(found)} of {len(found)} lines {kind}" if sum(found) > most * len(found) else None

        return finding

    def alphabetic(text: str) -> str | None:
        found = [any(map(str.isalpha, word)) for word in text.split()]
        few = sum(found) < settings.min_alphabetic * len(found)
        return f"{sum(found)} of {len(found)} words have letters" if few else None

    def stop_words(text: str) -> str | None:
        found = len(_STOP_WORDS.intersection(_WORD.findall(text.lower())))
        return f"{found} of {len(_STOP_WORDS)} stop words" if found < settings.min_stop_words else None

    yield Filter("gopher_words", words)
    yield Filter("gopher_word_length", word_length)
    yield Filter("gopher_symbols", symbols)
    yield Filter("gopher_bullets", lines("are bullets", lambda line: line.startswith(_BULLETS), settings.max_bullets))
    yield Filter("gopher_ellipsis", lines("end in …", lambda line: line.endswith(("...", "…")), settings.max_ellipses))
    yield Filter("gopher_alphabetic", alphabetic)
    yield Filter("gopher_stop_words", stop_words)
