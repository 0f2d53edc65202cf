"""The URL rules for lists of millions of lines: one regular expression splits a block, each host is checked once.

    rules = BulkUrlRules(BlacklistSettings(), shards=64)
    checked = rules.check(b"http://example.org/page\n# a comment\nftp://example.org/file\n")

A line is a URL or a Pushshift submission (a JSON object). Nine of ten URLs are plain (lower-case host, no port, no
escapes) and take a fast path. Every other line, and every line if an optional rule is on, goes through
`UrlRules.check`; both paths give the same result.
"""

import re
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import orjson
import xxhash

from common.settings import BlacklistSettings
from corpus.urls.bounded_cache import BoundedCache
from corpus.urls.hosts import ascii_host
from corpus.urls.public_suffix import registered_domain
from corpus.urls.rules import UrlRules
from corpus.urls.url import PATH_CHARACTERS, without_tracking

_PATH = re.escape(PATH_CHARACTERS)
_LINE = re.compile(
    rf"^(?:(https?://([a-z0-9.-]+)((?:/[{_PATH}]*)?)(?:\?([{_PATH}?]*))?)(?:\#[!-~]*)?|.*)\r?$", re.MULTILINE
)

_Host = tuple[str | None, str, int]
"""Why plain URLs of a host are dropped, or None; the host in canonical form; the shard."""


@dataclass
class CheckedUrls:
    """The URLs of a block of lines, in order."""

    urls: list[str] = field(default_factory=list)
    """As they will be requested; dropped URLs as given."""
    verdicts: list[int | str] = field(default_factory=list)
    """For each URL, the reason to drop it, or its shard."""
    hashes: list[int] = field(default_factory=list)
    """64-bit hashes of the canonical forms of the kept URLs."""


def _hash(canonical: str) -> int:
    return xxhash.xxh3_64_intdigest(canonical.encode())


def shard_of(host: str, shards: int) -> int:
    """The shard of a host: a hash of its registered domain, independent of the list."""
    return _hash(registered_domain(host)) % shards if shards > 1 else 0


class BulkUrlRules:
    """The URL rules for a list that is split into `shards`."""

    def __init__(self, settings: BlacklistSettings, shards: int) -> None:
        self._settings, self._shards, self._rules = settings, shards, UrlRules(settings)
        self.domain_lists = self._rules.domains.lists
        self._hosts = BoundedCache(self._host)

    def _host(self, host: str) -> _Host | None:
        """The verdict shared by all plain URLs of a host; None if each URL must be checked."""
        if self._rules.optional or self._settings.min_length > len("http://") + len(host):
            return None
        try:
            if ascii_host(host) != host:  # a final dot
                return None
        except ValueError:
            return "malformed", host, 0
        return self._rules.host_reason(host), host.removeprefix("www."), shard_of(host, self._shards)

    def check(self, block: bytes) -> CheckedUrls:
        """Check a block of whole lines. Blank lines and lines that begin with `#` are skipped."""
        checked = CheckedUrls()
        urls, verdicts, hashes = checked.urls, checked.verdicts, checked.hashes
        hosts, extensions, digest = self._hosts, self._rules.extensions, xxhash.xxh3_64_intdigest
        # invalid UTF-8 becomes characters that no URL may contain
        for line in _LINE.finditer(block.decode("utf-8", "surrogateescape").removesuffix("\n")):
            url, host, path, query = line.groups()
            if not host or "/." in path or (known := hosts[host]) is None:  # `/.` may be a dot segment
                self._check_line(line[0].strip(), checked)
                continue
            reason, canonical, shard = known
            if reason is None and "." in path and path[path.rfind(".") :].lower() in extensions:
                reason = "extension"
            if reason is not None:
                urls.append(line[0].rstrip())
                verdicts.append(reason)
                continue
            canonical += path or "/"
            if query and (kept := without_tracking(query)):
                canonical = f"{canonical}?{kept}"
            urls.append(url.removesuffix("?") if query == "" else url)
            verdicts.append(shard)
            hashes.append(digest(canonical.encode()))
        return checked

    def _check_line(self, line: str, checked: CheckedUrls) -> None:
        """Check a line that is not a plain URL."""
        if not line or line.startswith("#"):
            return
        reason: str | None = None
        if line.startswith("{"):
            line, reason = self._submission(line)
        url, verdict = (None, reason) if reason else self._rules.check(line)
        if url is None or verdict is not None:
            checked.urls.append(line.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
            checked.verdicts.append(verdict or "malformed")
        else:
            checked.urls.append(url.text)
            checked.verdicts.append(shard_of(url.site.host, self._shards))
            checked.hashes.append(_hash(url.canonical))

    def _submission(self, line: str) -> tuple[str, str | None]:
        """The URL of a Pushshift submission, and the reason to skip it before the URL rules, or None."""
        try:
            entry: Any = orjson.loads(line.encode("utf-8", "surrogateescape"))
        except orjson.JSONDecodeError:
            return line, "malformed"
        url = entry.get("url") or entry.get("url_overridden_by_dest")
        if not isinstance(url, str):
            return line, "malformed"
        url = _unescape(url)
        if url.startswith(("/r/", "/u/", "/user/")):  # a crosspost; its target is a separate submission
            url = f"https://www.reddit.com{url}"
        try:
            over_18 = _truth(entry.get("over_18"))
            is_self = _truth(entry.get("is_self"))  # if missing, `domain` drops self posts: their URLs are reddit's
            score = _number(entry.get("score", self._settings.min_score))
        except ValueError:
            return url, "malformed"
        if over_18 and not self._settings.over_18:
            return url, "over_18"
        if is_self and not self._settings.self_posts:
            return url, "self_post"
        return url, "score" if score < self._settings.min_score else None


def _unescape(text: str) -> str:
    """Undo the three escapes that Reddit applies to every text; `&copy=1` in a query is not an escape."""
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def _truth(value: object) -> bool:
    """A flag of a dump: a boolean, number or string. Raises ValueError for anything else."""
    text = str(value).strip().lower()
    if text in ("true", "1", "1.0", "yes", "t", "y"):
        return True
    if text in ("false", "0", "0.0", "no", "f", "n", "none", "null", ""):
        return False
    raise ValueError(f"not a flag: {text}")


def _number(value: object) -> float:
    """A score of a dump: a number or string. Raises ValueError for anything else."""
    if isinstance(value, int | float | str) and not isinstance(value, bool) and "_" not in str(value):
        number = float(value)
        if isfinite(number):
            return number
    raise ValueError(f"not a number: {value}")
