"""What the lines of every journal have in common."""

from collections.abc import Mapping
from typing import Any

import orjson

from corpus.urls.url import parse_url

Made = dict[str, Any]
"""The settings that an outcome was made with, by key."""

FORMAT = 2
"""Number in the first line of a journal."""


def key_of(url: str) -> str:
    """The form by which a URL is known; ValueError for a malformed one."""
    return parse_url(url).text


def to_line(entry: Mapping[str, Any]) -> bytes:
    """One line, with its line end."""
    return orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
