"""Finds the name of a robot in robots.txt: the product token of its User-Agent (RFC 9309, section 2.2.1).

product_token("MyBot/1.0 (+https://example.org)")                            # MyBot
product_token("Mozilla/5.0 (compatible; MyBot/1.0; +https://example.org)")   # MyBot, the form that known crawlers use
"""

import re
from collections.abc import Iterator
from itertools import pairwise

TOKEN = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_TOKEN = re.compile(rf"({TOKEN})(?!://)\b")
_PRODUCT = re.compile(rf"{TOKEN}/\S*")
_COMMENT = re.compile(r"\(([^()]*)\)?")
# Words in the User-Agent of browsers, and of robots that want the pages that browsers get
_BROWSERS = frozenset(
    "mozilla opera applewebkit khtml konqueror gecko chrome chromium crios fxios headlesschrome safari mobile version "
    "firefox seamonkey edge edg opr trident msie presto ubuntu linux android build compatible".split()
)


def product_token(user_agent: str) -> str | None:
    """The first product that a User-Agent names; None if it names only browsers or nothing."""
    tokens = (match[1] for candidate in _candidates(user_agent.strip()) if (match := _TOKEN.match(candidate)))
    return next((token for token in tokens if token.lower() not in _BROWSERS), None)


def _candidates(text: str) -> Iterator[str]:
    """Parts of a User-Agent that may be the name, the most common position first."""
    yield text
    fields = [field.strip() for comment in _COMMENT.findall(text) for field in comment.split(";")]
    for field, after in pairwise(fields):
        if field.lower() == "compatible":
            yield after
    for word in (*fields, *_COMMENT.sub(" ", text).split()):
        if _PRODUCT.fullmatch(word):
            yield word
