"""What the lines of all journal versions have in common."""

from collections.abc import Mapping
from typing import Any

import orjson

from corpus.urls.url import parse_url

OutcomeSettings = dict[str, Any]
"""The settings that an outcome depends on, by key."""

FORMAT = 2
"""Version in the first line of a journal."""


def key_of(url: str) -> str:
    """The form of a URL that identifies it in a journal. Raises ValueError for a malformed URL."""
    return parse_url(url).text


def to_line(entry: Mapping[str, Any]) -> bytes:
    """One line, with its line end."""
    return orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
