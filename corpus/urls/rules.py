"""URLs: which ones are worth fetching, and when two of them are the same page. Nothing here touches the network."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from common.files import read_lines, short_hash
from common.settings import BlacklistSettings
from corpus.urls.domains import Domains
from corpus.urls.hosts import ascii_host, is_private_host
from corpus.urls.hosts import is_private_address as is_private_address
from corpus.urls.memo import Memo

_SITE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://(.*)|.*)")
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]+)(?::([0-9]{0,5}))?")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f-\xa0\ud800-\udfff]")  # control characters, spaces, halves of characters
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_UNRESERVED = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"  # RFC 3986, 2.3
_ESCAPES = {f"%{code:02X}": chr(code) if chr(code) in _UNRESERVED else f"%{code:02X}" for code in range(256)}
PATH_CHARACTERS = _UNRESERVED + "/:@!$&'()*+,;="  # RFC 3986, 3.3: what a path holds unescaped; a query also has ?
_PLAIN = (PATH_CHARACTERS + "?").encode()
_DATA = Path(__file__).parent / "data"
_DOT_SEGMENT = re.compile(r"/(?:\.|%2e){1,2}(?=/|$)|\\", re.IGNORECASE)
DEFAULT_PORTS = {"http": 80, "https": 443}


class Site(NamedTuple):
    """What stands before the path of a URL."""

    scheme: str
    """Lower case."""
    host: str
    """Lower case, IDNA-encoded, without a final dot; empty where the scheme has none (mailto:)."""
    port: int | None
    """None where the URL names none."""
    text: str
    """As it is fetched: `http://host:port`."""
    canonical: str
    """As it is compared: no scheme, no `www.`, no default port."""


class Url(NamedTuple):
    """A URL that passed the syntax check."""

    site: Site
    path: str
    """Without dot segments."""
    query: str
    length: int
    """Characters of the URL as it was given."""

    @property
    def host(self) -> str:
        """The host alone; see `Site`."""
        return self.site.host

    @property
    def text(self) -> str:
        """The URL as it is fetched: as it was given, its host in ASCII, without dot segments and fragment."""
        return f"{self.site.text}{self.path}?{self.query}" if self.query else self.site.text + self.path

    @property
    def canonical(self) -> str:
        """The form in which two URLs of one page are equal.

        No scheme, host without `www.`, no default port, no fragment, percent-encoding normalised, tracking
        parameters removed.
        """
        site, path, query, _ = self
        path = path or "/"
        query = without_tracking(query) if query else ""
        text = f"{site.canonical}{path}?{query}" if query else site.canonical + path
        if text.encode().translate(None, _PLAIN):  # one URL in ten has more than plain characters
            query = "?" + _normal_escapes(query, PATH_CHARACTERS + "?") if query else ""
            text = site.canonical + _normal_escapes(path, PATH_CHARACTERS) + query
        return text


def _parse_site(text: str) -> Site:
    """What stands before the path; ValueError when it is malformed or carries credentials."""
    match = _SITE.fullmatch(text)
    if match is None:
        raise ValueError("no scheme")
    scheme, authority = match[1].lower(), match[2]
    if not authority:
        if scheme in DEFAULT_PORTS:
            raise ValueError("no host")
        return Site(scheme, "", None, text, text)
    if "@" in authority:
        raise ValueError("credentials in the URL")
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        raise ValueError("bad host or port")
    host, port = ascii_host(match[1]), int(match[2]) if match[2] else None
    if port is not None and not 0 < port < 65536:
        raise ValueError("port out of range")
    name = f"[{host}]" if ":" in host else host
    suffix = "" if port is None else f":{port}"
    shown = "" if port == DEFAULT_PORTS.get(scheme) else suffix
    return Site(scheme, host, port, f"{scheme}://{name}{suffix}", name.removeprefix("www.") + shown)


_SITES = Memo(_parse_site)


def parse_url(url: str) -> Url:
    """Split and check a URL by RFC 3986; ValueError when it is malformed or carries credentials."""
    url = url.strip()
    # printable text without a space has no forbidden character; the slower pattern decides the rest
    if (not url.isprintable() or " " in url) and _FORBIDDEN.search(url):
        raise ValueError("a space or control character inside")
    address, _, query = url.partition("#")[0].partition("?")
    end = address.find("/", address.find("//") + 2)
    if end < 0:
        return Url(_SITES[address], "", query, len(url))
    return Url(_SITES[address[:end]], _without_dot_segments(address[end:]), query, len(url))


def _without_dot_segments(path: str) -> str:
    r"""`/x/../p`, `/./p` and `/x\..\p` as browsers send them and servers read them: `/p` (RFC 3986, 5.2.4)."""
    if not _DOT_SEGMENT.search(path):
        return path
    kept: list[str] = []
    dots = ""
    for segment in path.replace("\\", "/").split("/")[1:]:
        dots = segment.lower().replace("%2e", ".")
        if dots == "..":
            del kept[-1:]
        elif dots != ".":
            kept.append(segment)
    return "/".join(["", *kept, *([""] if dots in (".", "..") else [])])


def _normal_escapes(text: str, characters: str) -> str:
    """Percent-encoding in one form: unreserved characters plain, everything else %XX in upper case."""
    text = _ESCAPE.sub(lambda match: _ESCAPES[match[0].upper()], text)
    return quote(text, safe=characters + "%")


def read_list(path: Path) -> list[str]:
    """The entries of a list of names, one a line; what follows a # is a comment."""
    lines = (line.decode("utf-8", "replace") for line in read_lines(path))
    return [entry for line in lines if (entry := line.split("#")[0].strip())]


@lru_cache(1)
def _tracking() -> re.Pattern[str]:
    """The fields of a query that do not choose the page: tracking parameters, and empty fields."""
    names = read_list(_DATA / "tracking_parameters.txt")
    fields = "|".join(re.escape(n[:-1]) + "[^&=]*" if n.endswith("*") else re.escape(n) for n in names)
    return re.compile(rf"(?:^|&)(?:(?:{fields})(?:=[^&]*)?)?(?=&|$)", re.IGNORECASE)


def without_tracking(query: str) -> str:
    """The fields of a query that choose the page, in their order."""
    return _tracking().sub("", query).lstrip("&")


def canonical_url(url: str) -> str:
    """`Url.canonical` of a URL; raises ValueError for a malformed one."""
    return parse_url(url).canonical


def document_id(url: str) -> str:
    """16 hex digits that name the page behind a URL."""
    return short_hash(canonical_url(url))


@dataclass(frozen=True)
class Rule:
    """A named reason to drop a URL."""

    name: str
    drops: Callable[[Url], object]
    """Whether it does; any true value counts."""


class UrlRules:
    """The URL rules in their order: malformed, scheme, short, private_host, domain, extension, pattern.

    `duplicate`, the last one, needs memory and lives in `corpus.blacklist`. Raises InputError or ConfigError for a list
    of domains that cannot be read, or of which no entry can match.
    """

    def __init__(self, settings: BlacklistSettings) -> None:
        self.domains = Domains(settings)
        self._allow_private = settings.allow_private_hosts
        self.extensions = frozenset(
            ending.lower() for ending in (*read_list(_DATA / "extensions.txt"), *settings.extra_extensions)
        )
        """Path endings that drop a URL."""
        patterns = [re.compile(pattern) for pattern in settings.extra_patterns]
        hosts = Memo(self.host_reason)
        self.rules = (
            Rule("scheme", lambda url: url.site.scheme not in DEFAULT_PORTS),
            Rule("short", lambda url: url.length < settings.min_length),
            Rule("private_host", lambda url: hosts[url.site.host] == "private_host"),
            Rule("domain", lambda url: hosts[url.site.host] == "domain"),
            Rule("extension", lambda url: url.path[url.path.rfind(".") :].lower() in self.extensions),
            Rule("pattern", lambda url: any(pattern.search(url.text) for pattern in patterns)),
        )

    def host_reason(self, host: str) -> str | None:
        """Why every URL of a host is dropped (private_host, domain), or None."""
        if not self._allow_private and is_private_host(host):
            return "private_host"
        return "domain" if self.domains.drop(host) else None

    def check(self, url: str) -> tuple[Url | None, str | None]:
        """The parsed URL (None when malformed) and the first reason to drop it (None to keep it)."""
        try:
            parsed = parse_url(url)
        except ValueError:
            return None, "malformed"
        return parsed, next((rule.name for rule in self.rules if rule.drops(parsed)), None)

    def reason(self, url: str) -> str | None:
        """Why a URL is dropped, or None."""
        return self.check(url)[1]
