"""The input and the results of filters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from corpus.text.language import Language, language_of


class Text(str):
    """A text whose words, lines and language are computed once for all filters."""

    @cached_property
    def words(self) -> list[str]:
        """Runs without white space, as in Gopher's paper."""
        return self.split()

    @cached_property
    def tokens(self) -> list[str]:
        """Words and punctuation, as spaCy's English tokenizer splits them."""
        with (english := _english()).memory_zone():  # frees new words
            return [text for token in english.tokenizer(str(self)) if (text := token.text.strip())]

    @cached_property
    def lines(self) -> list[str]:
        """The lines that are not blank, stripped."""
        return [stripped for line in self.split("\n") if (stripped := line.strip())]

    @cached_property
    def language(self) -> Language:
        """The detected language."""
        return language_of(self)


@cache
def _english() -> Any:
    import spacy

    english = spacy.blank("en")
    english.add_pipe("sentencizer")
    english.max_length = 1 << 31  # characters
    return english


def sentences(line: str) -> int:
    """The number of sentences of a line, as spaCy's sentencizer splits them."""
    with (english := _english()).memory_zone():
        return max(1, sum(bool(sentence.text.strip()) for sentence in english(line).sents))


@dataclass(frozen=True)
class Change:
    """A filter's change of a document that it keeps."""

    text: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """What was changed: lines cut, addresses replaced. Added up in the statistics."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Keys for the document's `meta`."""


Verdict = str | Change | None
"""What is wrong ("312 characters"), which drops a text; or what to change; None keeps the text."""


@dataclass(frozen=True)
class Filter:
    """A named reason to drop a document, or to change it."""

    name: str
    """The reason, as rejects and statistics show it."""
    judge: Callable[[Text], Verdict]
    """Picklable: it is sent to workers."""
