r"""Parse and apply robots.txt by RFC 9309.

    rules = parse_robots(b"User-agent: *\nDisallow: /private/\n", "urls-to-gpt2")
    rules.allows("/private/page")    # False

The path is compared as sent. The longest matching pattern decides; Allow wins a tie. No library is
used: Protego ends a group at an unknown line, treats all invalid UTF-8 as one character, and copies
each rule for every agent; urllib.robotparser has no wildcards. Where the RFC is silent, we follow
Google's parser: misspelt names, a missing colon, a partial byte-order mark.
"""

import asyncio
import codecs
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import quote

from common.errors import PageError
from common.files import is_binary
from corpus.urls.url import Url, parse_url

_MAX_BYTES = 500 * 1024  # RFC 9309, section 2.5
_MAX_REDIRECTS = 5  # RFC 9309, section 2.3.1.2
_UNREADABLE = frozenset({"timeout", "too_large", "bad_encoding"})  # the host responds, without readable rules
_LINE = re.compile(
    r"(?:(?P<agent>user[ \t-]*agents?)|(?P<disallow>dis+al+ow(?:ed)?|diasllow|disallaw)|(?P<allow>allow)"
    r"|(?P<delay>crawl[ \t-]*delay))(?:\s*:|\s+)\s*(?P<value>.*)",
    re.IGNORECASE,
)
_SECONDS = re.compile(r"[0-9]+(?:[.,][0-9]+)?|[.,][0-9]+")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})?")
_EQUIVALENT = "!&'()+,;=:@~"  # equivalent to their escapes, like letters, digits and -._


class PathRules:
    """Pairs (pattern with `*` and `$`, whether it allows): the first that matches decides."""

    def __init__(self, patterns: Iterable[tuple[str, bool]], crawl_delay: float = 0.0) -> None:
        self.crawl_delay = crawl_delay
        """Minimum seconds between two requests."""
        self._rules: list[tuple[str, list[str], bool, bool]] = []
        for pattern, allow in patterns:
            parts = _normalize(pattern.removesuffix("$"), "*").split("*")
            self._rules.append((max(parts, key=len), parts, pattern.endswith("$"), allow))

    def allows(self, path: str) -> bool:
        """Whether a path with its query, as sent, is allowed; True if no rule matches."""
        path = _normalize(path)
        for longest, parts, to_end, allow in self._rules:  # there may be 24,000: `in` rules most of them out
            if longest in path and _matches(parts, path, to_end):
                return allow
        return True


def robots_rules(rules: Iterable[tuple[str, bool]], crawl_delay: float = 0.0) -> PathRules:
    """The rules of one origin for one robot, from pairs (pattern, whether it allows)."""
    patterns: set[tuple[str, bool]] = set()
    for pattern, allow in rules:
        text = _normalize(pattern.removesuffix("$"), "*") + "$" * pattern.endswith("$")
        patterns.add((text, allow))
        if allow and text.endswith("/index.html"):  # as in Google's parser, this also allows the folder
            patterns.add((text.removesuffix("index.html") + "$", allow))
    by_length = sorted(
        ((text, allow) for text, allow in patterns if text), key=lambda rule: (-len(rule[0]), not rule[1])
    )
    return PathRules([("/robots.txt$", True), ("/robots.txt?", True), *by_length], crawl_delay)


def _matches(parts: list[str], text: str, to_end: bool) -> bool:
    """Whether a text starts with the parts in order, with anything between; `to_end`: equals."""
    first, *others = parts
    if not text.startswith(first):
        return False
    position = len(first)
    for number, part in enumerate(others, start=1):
        is_last = to_end and number == len(others)
        start = text.rfind(part, position) if is_last else text.find(part, position)
        if start < 0:
            return False
        position = start + len(part)
    return not to_end or position == len(text)


def _normalize(text: str, wildcards: str = "") -> str:
    """A path or pattern in the form in which they are compared.

    Characters equivalent to their escapes are unescaped, all others escaped in upper case. `/` and
    `?` stay in a path, and are unescaped in a query. Bytes that are not UTF-8 are kept.
    """
    path, mark, query = text.partition("?")
    unescaped = _unescape(path, "") + mark + _unescape(query, "/?")
    return quote(unescaped, safe=f"%/?{_EQUIVALENT}{wildcards}", errors="surrogateescape")


def _unescape(text: str, more: str) -> str:
    def character(match: re.Match[str]) -> str:
        if match[1] is None:
            return "%25"
        unescaped = chr(int(match[1], 16))
        if unescaped.isascii() and (unescaped.isalnum() or unescaped in f"-._{_EQUIVALENT}{more}"):
            return unescaped
        return match[0].upper()

    return _ESCAPE.sub(character, text) if "%" in text else text


def parse_robots(body: bytes, robot: str) -> PathRules:
    """The rules for `robot` (a product token): of all groups that match its name best, or `*`."""
    rules: defaultdict[int, list[tuple[str, bool]]] = defaultdict(list)
    delays: defaultdict[int, float] = defaultdict(float)
    group = best = -1  # the best match among the agents of the current group, and of all groups
    ruled = False
    for line in _lines(body):
        match = _LINE.fullmatch(line.partition("#")[0].strip())
        if match is None:
            continue  # unknown lines do not end a group
        value = match["value"]
        if match["agent"]:
            if ruled:
                group, ruled = -1, False
            group = max(group, _match_length(value, robot))
            best = max(best, group)
        elif match["delay"]:  # it does not end a group
            if seconds := _SECONDS.match(value):
                delays[group] = max(delays[group], float(seconds[0].replace(",", ".")))
        else:
            ruled = True
            rules[group].append((value, bool(match["allow"])))
    return robots_rules(rules[best], delays[best]) if best >= 0 else robots_rules([])


def _lines(body: bytes) -> list[str]:
    """The lines of a robots.txt up to the RFC's limit, without a (partial) byte-order mark."""
    text = body[:_MAX_BYTES].lstrip(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")
    lines = re.split(r"\r\n|\r|\n", text)
    return lines[:-1] if len(body) > _MAX_BYTES else lines  # half a pattern would have another meaning


def _match_length(agent: str, robot: str) -> int:
    """How many characters of an agent line match a robot's name; 0 for `*`, -1 if none."""
    name, robot = re.split(r"[\s/]", agent, maxsplit=1)[0].lower(), robot.lower()
    return len(name.replace("*", "")) if name and _matches(name.split("*"), robot, to_end=True) else -1


async def fetch_robots(location: str, robot: str, request: Callable[[Url], Awaitable[bytes | str]]) -> PathRules | str:
    """The rules of a robots.txt, or why nothing may be fetched; without it (4xx) all may be.

    `request` is that of `fetch_file`.
    """
    file = await fetch_file(location, request)
    if file == "unreachable" or (isinstance(file, bytes) and is_binary(file)):
        return "robots_unreachable"
    # in a thread: 500 KiB take 0.2 s
    return file if isinstance(file, str) else await asyncio.to_thread(parse_robots, file, robot)


async def fetch_file(location: str, request: Callable[[Url], Awaitable[bytes | str]]) -> bytes | str:
    """A file for robots of an origin, empty if there is none (4xx); or why it is unknown.

    `request` returns a body or the URL of a redirect, or raises PageError. The reason of an
    unreachable origin is that of its pages; of an unreadable or unreachable file, `unreachable`.
    """
    for hop in range(_MAX_REDIRECTS + 1):
        try:
            answer = await request(parse_url(location))
        except ValueError:
            break  # a redirect to a malformed URL
        except PageError as error:
            if error.reason == "http_204" or (error.reason.startswith("http_4") and error.reason != "http_429"):
                break
            if error.reason == "redirect_refused" or (hop and error.reason in ("private_host", "no_contact")):
                break  # a redirect to a forbidden target
            if hop or error.reason.startswith("http_") or error.reason in _UNREADABLE:
                return "unreachable"
            return error.reason
        if isinstance(answer, bytes):
            return answer
        location = answer
    return b""
