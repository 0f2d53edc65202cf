"""The URL rules: which URLs are worth fetching. A rule is a name and a function that says whether it drops a URL.

UrlRules(BlacklistSettings()).reason("http://example.org/photo.jpg")    # extension
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.settings import BlacklistSettings
from corpus.urls.bounded_cache import BoundedCache
from corpus.urls.domain_lists import DomainBlocklist
from corpus.urls.hosts import is_private_host
from corpus.urls.url import DATA, DEFAULT_PORTS, Url, parse_url, read_list


@dataclass(frozen=True)
class Rule:
    """A named reason to drop a URL."""

    name: str
    drops: Callable[[Url], object]
    """Truthy if the rule drops the URL."""


def _optional_rules(settings: BlacklistSettings) -> Iterator[Rule]:
    """The rules that a configuration key turns on. A new rule goes here, and its key into `BlacklistSettings`."""
    if settings.extra_patterns:
        patterns = [re.compile(pattern) for pattern in settings.extra_patterns]
        yield Rule("pattern", lambda url: any(pattern.search(url.text) for pattern in patterns))


class UrlRules:
    """The URL rules in order: malformed, scheme, short, private_host, domain, extension, then the optional ones.

    `duplicate` comes last, needs memory, and lives in `corpus.blacklist`. Raises InputError or ConfigError for a domain
    list that cannot be read or has no usable entry.
    """

    def __init__(self, settings: BlacklistSettings) -> None:
        self.domains = DomainBlocklist(settings)
        self.allow_private = settings.allow_private_hosts
        """Whether loopback, private and link-local hosts are allowed."""
        self.extensions = frozenset(
            ending.lower() for ending in (*read_list(DATA / "extensions.txt"), *settings.extra_extensions)
        )
        """Path endings that drop a URL."""
        self.optional = tuple(_optional_rules(settings))
        hosts = BoundedCache(self.host_reason)
        self.rules = (
            Rule("scheme", lambda url: url.site.scheme not in DEFAULT_PORTS),
            Rule("short", lambda url: url.length < settings.min_length),
            Rule("private_host", lambda url: hosts[url.site.host] == "private_host"),
            Rule("domain", lambda url: hosts[url.site.host] == "domain"),
            Rule("extension", lambda url: url.path[url.path.rfind(".") :].lower() in self.extensions),
            *self.optional,
        )

    def host_reason(self, host: str) -> str | None:
        """Why every URL of a host is dropped (private_host, domain), or None."""
        if not self.allow_private and is_private_host(host):
            return "private_host"
        return "domain" if self.domains.blocks(host) else None

    def check(self, url: str) -> tuple[Url | None, str | None]:
        """The parsed URL (None if malformed) and the first reason to drop it (None to keep it)."""
        try:
            parsed = parse_url(url)
        except ValueError:
            return None, "malformed"
        return parsed, next((rule.name for rule in self.rules if rule.drops(parsed)), None)

    def reason(self, url: str) -> str | None:
        """Why a URL is dropped, or None."""
        return self.check(url)[1]
