"""Registered domains by the public suffix list: `example.co.uk` for `www.example.co.uk` (publicsuffix.org/list).

The rules are the ICANN section of the snapshot bundled with tldextract. Matching them by set look-ups takes a tenth of
the time of its `TLDExtract`, which matters for lists with millions of hosts.
"""

from functools import lru_cache

import idna
import tldextract

# suffix_list_urls=(), cache_dir=None: never a download, never a lock on a shared home directory
_SNAPSHOT = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)


@lru_cache(1)
def _rules() -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Suffixes, the parents of wildcards (`*.ck`), and the exceptions to those (`!www.ck`)."""
    rules = [rule if rule.isascii() else _ascii(rule) for rule in _SNAPSHOT.tlds]
    return (
        frozenset(rules),
        frozenset(rule[2:] for rule in rules if rule.startswith("*.")),
        frozenset(rule[1:] for rule in rules if rule.startswith("!")),
    )


def _ascii(rule: str) -> str:
    return ".".join(label if label.isascii() else idna.alabel(label).decode() for label in rule.split("."))


def is_public_suffix(host: str) -> bool:
    """Whether domains are registered directly below an ASCII host (`com`, `co.uk`). True for any name without a dot."""
    suffixes, wildcards, exceptions = _rules()
    parent = host.partition(".")[2]
    return host not in exceptions and (not parent or host in suffixes or parent in wildcards)


def registered_domain(host: str) -> str:
    """The registered domain of an ASCII host; the host itself if it is an address or a public suffix.

    A top-level domain missing from the list counts as a public suffix (the list's default rule).
    """
    if ":" in host or host.rpartition(".")[2].isdigit():
        return host
    suffixes, wildcards, exceptions = _rules()
    domain = rest = host
    while True:
        _, _, parent = rest.partition(".")
        if rest in exceptions:
            return rest
        if rest in suffixes or parent in wildcards or not parent:
            return domain
        domain, rest = rest, parent
