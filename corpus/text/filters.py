"""Filters that drop documents: small functions that look at the repaired text and say what is wrong with it.

    text = Text(repair(document["text"]))
    next((f.name for f in filters(settings) if f.detail(text)), "keep")

OpenWebText's rules, and Gopher's quality rules (Rae et al. 2021, "Scaling Language Models", table A1), which are off by
default. To add a filter, write its function and add it to `filters`.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial

from common.settings import CleanSettings
from corpus.text.language import Language, language_of

_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_BULLETS = ("•", "‣", "-", "*")
_ELLIPSES = ("...", "…")
_WORD = re.compile(r"\w+")


class Text(str):
    """A text that is split once, however many filters look at its words or lines."""

    @cached_property
    def words(self) -> list[str]:
        """What stands between white space, as in Gopher's paper."""
        return self.split()

    @cached_property
    def lines(self) -> list[str]:
        """The lines that are not blank, stripped."""
        return [stripped for line in self.split("\n") if (stripped := line.strip())]

    @cached_property
    def language(self) -> Language:
        """What the detector says about it."""
        return language_of(self)


@dataclass(frozen=True)
class Filter:
    """A named reason to drop a document."""

    name: str
    """The reason, as rejects and statistics show it."""
    detail: Callable[[Text], str | None]
    """What is wrong with a text, for people ("312 characters"); None keeps it. Picklable: it is sent to workers."""


def filters(settings: CleanSettings) -> tuple[Filter, ...]:
    """The filters of a configuration in the order in which they are asked; the slowest is last."""
    return (
        Filter("empty", empty),
        Filter("javascript", partial(javascript, most=settings.javascript_characters)),
        Filter("short", partial(short, least=settings.min_characters)),
        *(GOPHER if settings.gopher else ()),
        *([Filter("language", partial(language, expected=settings.languages))] if settings.languages else ()),
    )


def empty(text: Text) -> str | None:
    """No text at all, or white space alone."""
    return None if text.strip() else "no text"


def javascript(text: Text, most: int) -> str | None:
    """A short notice that the browser lacks JavaScript, in place of the page."""
    notice = len(text) < most and "javascript" in text.lower()
    return f"{len(text)} characters with 'javascript'" if notice else None


def short(text: Text, least: int) -> str | None:
    """Too few characters."""
    return f"{len(text)} characters" if len(text) < least else None


def language(text: Text, expected: Collection[str]) -> str | None:
    """Another language than the expected ones."""
    code = text.language.code
    return None if code in expected else code or "no letters"


def gopher_words(text: Text) -> str | None:
    """Too few or too many words."""
    count = len(text.words)
    return None if 50 <= count <= 100_000 else f"{count} words"


def gopher_word_length(text: Text) -> str | None:
    """Words that are too short or too long on average."""
    mean = sum(map(len, text.words)) / max(len(text.words), 1)
    return None if 3 <= mean <= 10 else f"words of {mean:.1f} characters"


def gopher_symbols(text: Text) -> str | None:
    """Too many hash signs or ellipses per word."""
    count, words = max(text.count("#"), sum(map(text.count, _ELLIPSES))), len(text.words)
    return f"{count} # or … in {words} words" if count > 0.1 * words else None


def gopher_bullets(text: Text) -> str | None:
    """Too many lines that begin with a bullet."""
    count, lines = sum(line.startswith(_BULLETS) for line in text.lines), len(text.lines)
    return f"{count} of {lines} lines are bullets" if count > 0.9 * lines else None


def gopher_ellipsis(text: Text) -> str | None:
    """Too many lines that end with an ellipsis."""
    count, lines = sum(line.endswith(_ELLIPSES) for line in text.lines), len(text.lines)
    return f"{count} of {lines} lines end in …" if count > 0.3 * lines else None


def gopher_alphabetic(text: Text) -> str | None:
    """Too few words with a letter in them."""
    count, words = sum(any(map(str.isalpha, word)) for word in text.words), len(text.words)
    return f"{count} of {words} words have letters" if count < 0.8 * words else None


def gopher_stop_words(text: Text) -> str | None:
    """Too few of the stop words that every English text has."""
    count = len(_STOP_WORDS.intersection(_WORD.findall(text.lower())))
    return f"{count} of {len(_STOP_WORDS)} stop words" if count < 2 else None


_GOPHERS = (
    *(gopher_words, gopher_word_length, gopher_symbols, gopher_bullets, gopher_ellipsis),
    *(gopher_alphabetic, gopher_stop_words),
)
GOPHER = tuple(Filter(rule.__name__, rule) for rule in _GOPHERS)
"""Gopher's quality rules."""
