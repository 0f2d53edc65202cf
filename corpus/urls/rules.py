"""The URL rules: which URLs are worth fetching.

UrlRules(BlacklistSettings()).reason("http://example.org/photo.jpg")    # extension
"""

import re
from collections.abc import Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from common.settings import BlacklistSettings
from corpus.urls.domain_lists import DomainBlocklist
from corpus.urls.hosts import ascii_host, is_private_host, registered_domain
from corpus.urls.url import (
    DATA,
    DEFAULT_PORTS,
    PATH_CHARACTERS,
    BoundedCache,
    Url,
    parse_url,
    read_list,
    without_tracking,
)

_Hashes = NDArray[np.uint64]
_PATH = re.escape(PATH_CHARACTERS)
# nine of ten URLs have a lower-case host, no port and no escapes; ten times faster than parse_url
_USUAL_LINE = re.compile(
    rf"^(?:(https?://([a-z0-9.-]*[a-z0-9-])((?:/[{_PATH}]*)?)(?:\?([{_PATH}?]*))?)(?:\#[!-~]*)?|.*)\r?$", re.MULTILINE
)
_HostVerdict = tuple[str | None, str, int]
"""Of a host: the reason to drop its URLs (malformed, private_host, domain) or None; its canonical
form; its shard. A plain tuple, as the garbage collector would traverse 262,144 objects repeatedly.
"""
UrlVerdict = tuple[str, str | None, int, str]
"""Of a URL: as requested (as given if dropped); the reason to drop it, or None; its shard; its
canonical form.
"""


class UrlRules:
    """The URL rules: malformed, scheme, short, private_host, domain, extension, pattern.

    The caller drops duplicates after these rules, with `SeenUrls`. Raises InputError for a domain
    list that cannot be read or has no usable entry.
    """

    def __init__(self, settings: BlacklistSettings, shards: int = 1) -> None:
        self.domains = DomainBlocklist(settings)
        self.allow_private = settings.allow_private_hosts
        """Whether loopback, private and link-local hosts are allowed."""
        endings = (*read_list(DATA / "extensions.txt"), *settings.extra_extensions)
        self._extensions = frozenset(ending.lower() for ending in endings)
        self._min_length, self._shards = settings.min_length, shards
        self._patterns = [re.compile(pattern) for pattern in settings.extra_patterns]
        self._hosts = BoundedCache(self._check_host)  # large lists name each host many times

    def check(self, url: str) -> tuple[Url | None, str | None]:
        """The parsed URL (None if malformed) and the first reason to drop it (None to keep it)."""
        try:
            parsed = parse_url(url)
        except ValueError:
            return None, "malformed"
        reason = self._host(parsed)[0] if parsed.host else None
        return parsed, self._drop_reason(parsed.text, parsed.scheme, len(url.strip()), reason, parsed.path)

    def reason(self, url: str) -> str | None:
        """The first reason to drop a URL, or None."""
        return self.check(url)[1]

    def judge(self, lines: str) -> Iterator[UrlVerdict]:
        """Check each line of a list, except blank lines and comments."""
        hosts = self._hosts
        for line in _USUAL_LINE.finditer(lines):
            url, host, path, query = line.groups()
            if not host or "/." in path:  # `/.` may be a dot segment
                if (text := line[0].strip()) and text[0] != "#":
                    yield self.judge_one(text)
                continue
            reason, canonical, shard = hosts[host]
            if query == "":
                url = url.removesuffix("?")
            given = line[0].rstrip()
            if reason := self._drop_reason(url, "http", len(given), reason, path):
                yield given, reason, 0, ""
                continue
            canonical += path or "/"
            if query and (kept := without_tracking(query)):
                canonical = f"{canonical}?{kept}"
            yield url, None, shard, canonical

    def judge_one(self, text: str) -> UrlVerdict:
        """Check one URL of any form."""
        url, reason = self.check(text)
        if url is None or reason:
            return text, reason, 0, ""
        return url.text, None, self._host(url)[2], url.canonical

    def _drop_reason(self, text: str, scheme: str, length: int, host_reason: str | None, path: str) -> str | None:
        """The first reason to drop a URL. New rules go here, their keys into BlacklistSettings."""
        if host_reason == "malformed":
            return host_reason
        if scheme not in DEFAULT_PORTS:
            return "scheme"
        if length < self._min_length:
            return "short"
        if host_reason is not None:
            return host_reason
        if "." in path and path[path.rfind(".") :].lower() in self._extensions:
            return "extension"
        if self._patterns and any(pattern.search(text) for pattern in self._patterns):
            return "pattern"
        return None

    def _host(self, url: Url) -> _HostVerdict:
        return self._hosts[f"[{url.host}]" if ":" in url.host else url.host]

    def _check_host(self, name: str) -> _HostVerdict:
        try:
            host = ascii_host(name)
        except ValueError:
            return "malformed", name, 0
        domain, reason = registered_domain(host), None
        if not self.allow_private and is_private_host(host):
            reason = "private_host"
        elif self.domains.blocks(host, domain):
            reason = "domain"
        shard = hash64(domain) % self._shards if self._shards > 1 else 0
        return reason, host.removeprefix("www."), shard


def hash64(text: str) -> int:
    """A hash of 64 bits."""
    return xxhash.xxh3_64_intdigest(text.encode())


class SeenUrls:
    """Finds duplicates in a list of any length: `hash64` of the canonical forms so far.

    Sorted runs that double in size: O(n log n) time, 8 bytes per hash, 16 at the peak.
    """

    def __init__(self) -> None:
        self._runs: list[_Hashes] = []

    def add(self, hashes: _Hashes) -> NDArray[np.bool_]:
        """Add a batch; returns for each hash whether it is new: neither earlier here nor before."""
        unique, first_index = np.unique(hashes, return_index=True)
        new = ~self.holds(unique)
        if new.any():
            self._runs.append(unique[new])
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            merged = np.concatenate([self._runs.pop(-2), self._runs.pop()])
            merged.sort(kind="stable")  # two sorted runs: one pass
            self._runs.append(merged)
        result = np.zeros(len(hashes), dtype=np.bool_)
        result[first_index[new]] = True
        return result

    def holds(self, hashes: _Hashes) -> NDArray[np.bool_]:
        """For each hash, whether it is in a batch that was added."""
        held = np.zeros(len(hashes), dtype=np.bool_)
        for run in self._runs:
            index = np.searchsorted(run, hashes)
            index[index == len(run)] = 0  # larger than all hashes of the run: compare with any
            held |= run[index] == hashes
        return held
