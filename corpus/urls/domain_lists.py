"""Domain blocklists: the built-in one, the user's own, and public ones.

An entry without a dot is a name: `example` drops example.com, www.example.co.uk and every other
registered domain of that name. An entry with a dot drops a host and everything below it:

    example.com   www.example.com   .example.com   *.example.com   EXAMPLE.COM.   192.0.2.1
    bücher.example   http://example.com/   example.com:8080   ||example.com^   example.* (a name)
    0.0.0.0 example.com (hosts files)

`www.` and ports are ignored, as in the canonical form of a URL. Entries that can never match a host
(paths, regular expressions) or would match a whole public suffix (`co.uk`) are reported.
"""

import ipaddress
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.errors import InputError
from common.files import read_lines
from common.settings import BlacklistSettings
from corpus.urls.hosts import ascii_host, ascii_name, is_address, is_public_suffix

_BUILT_IN = Path(__file__).parent / "data" / "domains.txt"
_PLAIN = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.){1,9}[a-z]{2,20}")
_HEADING = re.compile(r"!.*|\[[^\[\]:]*\]")  # comments and `[Adblock Plus 2.0]` in Adblock's lists
_COSMETIC = re.compile(r"[^#\s]+#[@?$%]*#")  # in Adblock lists, `example.com##.banner` hides a part of a page
_ADBLOCK = re.compile(r"\|\|([^|^$]+)\^?\|?(?:\$(?:(?:important|document|doc|all|popup),?)+)?")
_SITE = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//(.*)", re.IGNORECASE)
_WITH_PORT = re.compile(r"(\[[^\[\]]*\]|[^:]*):[0-9]{0,5}")
_SUBTREE = re.compile(r"^\*?\.")  # everything below a host; here the host itself is included
_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")


@dataclass
class DomainListReport:
    """Counts of a list's entries."""

    name: str
    """The file, or the configuration key."""
    entries: int = 0
    unusable: int = 0
    """Entries that can never match."""
    first: str = ""
    """The first unusable entry: location, text, and why it cannot match."""

    def __str__(self) -> str:
        return f"{self.name}: {self.unusable} of {self.entries} entries can never match; the first: {self.first}"


class DomainBlocklist:
    """All domains that `settings` drop. Raises InputError for a list without a usable entry."""

    def __init__(self, settings: BlacklistSettings) -> None:
        self._keys: set[str] = set()
        """`example.com` for a host and everything below it, `example.*` for a name."""
        files = (_BUILT_IN, *settings.domain_lists)
        self.lists = [self._add(str(path), map(_decode, read_lines(path)), _host_or_name) for path in files]
        self.lists.append(self._add("blacklist.extra_domains", settings.extra_domains, _host_or_name))
        self.lists.append(self._add("blacklist.extra_suffixes", settings.extra_suffixes, _suffix))

    def blocks(self, host: str, domain: str) -> bool:
        """Whether a normalised host is on a list; `domain` is its registered domain."""
        if is_address(host):
            return host in self._keys
        if domain.partition(".")[0] + ".*" in self._keys:
            return True
        while host and host not in self._keys:
            host = host.partition(".")[2]
        return bool(host)

    def _add(self, name: str, lines: Iterable[str], parse: Callable[[str], str]) -> DomainListReport:
        """Add `parse(entry)` of a list's entries. Raises InputError if none is usable."""
        report = DomainListReport(name)
        for number, line in enumerate(lines, start=1):
            for entry in (line,) if _PLAIN.fullmatch(line) else _entries(line):
                report.entries += 1
                try:
                    self._keys.add(parse(entry))
                except ValueError as error:
                    report.unusable += 1
                    report.first = report.first or f"{name}:{number}: {entry[:80]!r} ({error})"
        if report.entries and report.unusable == report.entries:
            raise InputError(f"{report}; give domains, or remove the list from the configuration")
        return report


def _decode(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:  # some old lists are Latin-1
        return line.decode("latin-1")


def _entries(line: str) -> list[str]:
    """The entries on a line; a blank line or a comment has none."""
    line = line.strip().removeprefix("\ufeff")
    if _COSMETIC.match(line):
        return [line]
    words = line.partition("#")[0].split()
    if not words or (line[0] in "![" and _HEADING.fullmatch(line)):
        return []
    if len(words) == 1:
        return words
    # in a hosts file an address precedes the names; names without a dot (localhost) are local
    return [word for word in words[1:] if "." in word] if _is_ip(words[0]) else [line]


def _is_ip(word: str) -> bool:
    try:
        ipaddress.ip_address("0.0.0.0" if word == "0" else word)
    except ValueError:
        return False
    return True


def _host_or_name(entry: str) -> str:
    """The key of an entry: a normalised host or a name. Raises ValueError if it can never match."""
    if _PLAIN.fullmatch(entry):  # most lines of large lists
        return _without_www(entry)
    bare = _bare(entry)
    text = _SUBTREE.sub("", bare)
    if text == bare and text.endswith(".*"):
        return _label(text.removeprefix("www.").removesuffix(".*")) + ".*"
    if "." in text or ":" in text:
        host = _host(text)
        return host if is_address(host) else _without_www(host)
    return _label(text) + ".*" if text == bare else _without_www(_label(text))


def _without_www(host: str) -> str:
    domain = host.removeprefix("www.")
    if not is_public_suffix(domain):
        return domain
    if domain == host:
        raise ValueError("a public suffix; use blacklist.extra_suffixes to drop everything below it")
    return host  # www.com, www.gov.uk


def _suffix(entry: str) -> str:
    """The host suffix of an entry of `extra_suffixes`."""
    text = _SUBTREE.sub("", _bare(entry))
    return _host(text) if "." in text or ":" in text else _label(text)


def _bare(entry: str) -> str:
    """An entry without Adblock markup, scheme, final slash and port."""
    if " " in entry or "\t" in entry:
        raise ValueError("more than one word")
    is_rule = entry.startswith("||")
    match = (_ADBLOCK if is_rule else _SITE).fullmatch(entry)
    if "#" in entry or entry.startswith("@@") or (is_rule and not match):
        raise ValueError("a rule for parts of pages, or an exception")
    text = (match[1] if match else entry).removesuffix("/")
    if "/" in text or "?" in text:
        raise ValueError("a path or a regular expression")
    match = _WITH_PORT.fullmatch(text)
    return match[1] if match else text


def _host(text: str) -> str:
    try:
        return ascii_host(f"[{text}]" if ":" in text and not text.startswith("[") else text)
    except ValueError:
        raise ValueError("not a host name") from None


def _label(text: str) -> str:
    with suppress(ValueError):
        if _NAME.fullmatch(name := ascii_name(text)):
            return name
    raise ValueError("not a host name")
