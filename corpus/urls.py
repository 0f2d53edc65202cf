"""URLs: which ones are worth fetching, and when two of them are the same page.

Nothing here touches the network: public suffixes come from the snapshot inside tldextract.
"""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from urllib.parse import SplitResult, quote, urlsplit

import idna
import tldextract

from common.files import short_hash
from common.settings import BlacklistSettings

# suffix_list_urls=(), cache_dir=None: never a download, never a lock on a shared home directory
_SUFFIXES = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f-\xa0]")  # control characters and spaces
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")  # RFC 3986, 2.3
_LOCAL_NAMES = ("localhost", "local", "internal", "home.arpa")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Url:
    """A URL that passed the syntax check."""

    parts: SplitResult
    scheme: str
    """Lower case."""
    host: str
    """Lower case, IDNA-encoded, without a final dot; empty where the scheme has none (mailto:)."""
    port: int | None
    """None where the URL names none."""

    @property
    def text(self) -> str:
        """The URL as it is fetched: as it was given, with its host in ASCII and without a fragment."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        netloc = host if self.port is None else f"{host}:{self.port}"
        return self.parts._replace(scheme=self.scheme, netloc=netloc, fragment="").geturl()

    @property
    def canonical(self) -> str:
        """The form in which two URLs of one page are equal.

        No scheme, host without `www.`, no default port, no fragment, percent-encoding normalised, tracking
        parameters removed.
        """
        names, prefixes = _tracking()
        host = self.host.removeprefix("www.")
        port = "" if self.port in (None, DEFAULT_PORTS.get(self.scheme)) else f":{self.port}"
        path = _normal_escapes(self.parts.path, "/:@!$&'()*+,;=~") or "/"
        kept = [
            field
            for field in self.parts.query.split("&")
            if field and (name := field.split("=", 1)[0].lower()) not in names and not name.startswith(prefixes)
        ]
        query = "?" + _normal_escapes("&".join(kept), "/?:@!$&'()*+,;=~") if kept else ""
        return f"{host}{port}{path}{query}"


def is_private_address(address: str) -> bool:
    """Whether an IP address is anything but a public one, also when it hides inside an IPv6 address."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        ip = inner or ip
    return not ip.is_global or ip.is_multicast


def _ascii_host(host: str) -> str:
    """A host name or address in its one written form; ValueError when it is neither."""
    host = host.lower().removesuffix(".")
    if not host.isascii():
        host = idna.encode(host, uts46=True).decode()  # idna.IDNAError is a ValueError
    if ":" in host:
        return str(ipaddress.IPv6Address(host))
    labels = host.split(".")
    if labels[-1].isdigit() or labels[-1].startswith("0x"):
        return str(ipaddress.IPv4Address(host))  # 999.999.999.999 and 0x7f.1 are no addresses
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("bad host name")
    if len(labels) == 1 and host not in _LOCAL_NAMES:
        raise ValueError("a host name needs a domain")
    return host


def parse_url(url: str) -> Url:
    """Split and check a URL by RFC 3986; ValueError when it is malformed or carries credentials."""
    url = url.strip()
    scheme = _SCHEME.match(url)
    if scheme is None or _FORBIDDEN.search(url):
        raise ValueError("no scheme, or a space or control character inside")
    parts = urlsplit(url)
    if not parts.netloc:
        if scheme[1].lower() in DEFAULT_PORTS:
            raise ValueError("no host")
        return Url(parts, parts.scheme, "", None)
    if "@" in parts.netloc:
        raise ValueError("credentials in the URL")
    return Url(parts, parts.scheme, _cached_host(parts.hostname or ""), parts.port)


_cached_host = lru_cache(maxsize=1 << 16)(_ascii_host)


def _normal_escapes(text: str, safe: str) -> str:
    """Percent-encoding in one form: unreserved characters plain, everything else %XX in upper case."""

    def one(match: re.Match[str]) -> str:
        character = chr(int(match[1], 16))
        return character if character in _UNRESERVED else match[0].upper()

    return quote(_ESCAPE.sub(one, text), safe=safe + "%")


def _read_list(name: str) -> list[str]:
    """The entries of a data file, comments and blank lines left out."""
    lines = (resources.files("corpus") / "data" / name).read_text(encoding="utf-8").splitlines()
    return [entry for line in lines if (entry := line.split("#")[0].strip())]


@lru_cache(maxsize=1)
def _tracking() -> tuple[frozenset[str], tuple[str, ...]]:
    """Tracking parameters: whole names, and beginnings of names."""
    names = _read_list("tracking_parameters.txt")
    return frozenset(n for n in names if "*" not in n), tuple(n.rstrip("*") for n in names if n.endswith("*"))


def canonical_url(url: str) -> str:
    """`Url.canonical` of a URL; raises ValueError for a malformed one."""
    return parse_url(url).canonical


def document_id(url: str) -> str:
    """16 hex digits that name the page behind a URL."""
    return short_hash(canonical_url(url))


@lru_cache(maxsize=1 << 16)
def registered_domain(host: str) -> str:
    """`example.co.uk` for `www.example.co.uk`; the host itself where it is an address or a public suffix.

    A top-level domain that is not on the list is a public suffix (the list's own default rule, publicsuffix.org).
    """
    found = _SUFFIXES(host)
    if found.suffix or found.ipv4 or found.ipv6:
        return found.top_domain_under_public_suffix or host
    return ".".join(host.split(".")[-2:])


@dataclass(frozen=True)
class Rule:
    """A named reason to drop a URL."""

    name: str
    drops: Callable[[Url], bool]


class UrlRules:
    """The URL rules in their order: malformed, scheme, short, private_host, domain, extension.

    `duplicate`, the last one, needs memory and lives in `corpus.blacklist`.
    """

    def __init__(self, settings: BlacklistSettings) -> None:
        self._domains = frozenset((*_read_list("domains.txt"), *(name.lower() for name in settings.extra_domains)))
        self._extensions = tuple(
            extension.lower() for extension in (*_read_list("extensions.txt"), *settings.extra_extensions)
        )
        self._min_length = settings.min_length
        self._allow_private = settings.allow_private_hosts
        self.rules = (
            Rule("scheme", lambda url: url.scheme not in DEFAULT_PORTS),
            Rule("short", lambda url: len(url.parts.geturl()) < self._min_length),
            Rule("private_host", lambda url: not self._allow_private and self._is_private(url.host)),
            Rule("domain", lambda url: self._is_blocked(url.host)),
            Rule("extension", lambda url: url.parts.path.lower().endswith(self._extensions)),
        )
        self._is_blocked = lru_cache(maxsize=1 << 16)(self._is_blocked_host)

    @staticmethod
    def _is_private(host: str) -> bool:
        if host[-1:].isdigit() or ":" in host:
            try:
                return is_private_address(host)
            except ValueError:
                return False  # a name that ends in a digit
        return host in _LOCAL_NAMES or host.endswith(tuple("." + name for name in _LOCAL_NAMES))

    def _is_blocked_host(self, host: str) -> bool:
        domain = registered_domain(host)
        return domain in self._domains or domain.split(".", 1)[0] in self._domains

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
