"""Hosts of URLs: normalised form, whether they are public, and their registered domain.

    ascii_host("Bücher.Example.")           # xn--bcher-kva.example
    is_private_address("64:ff9b::7f00:1")   # True: 127.0.0.1 behind NAT64
    registered_domain("www.example.co.uk")  # example.co.uk

The tables follow IANA's special-purpose registries; `ipaddress` covers fewer networks, and
different ones in each Python release. Registered domains follow the ICANN section of the public
suffix list (publicsuffix.org/list) in tldextract's snapshot; set lookups take a tenth of the time
of `TLDExtract`, which matters for millions of hosts.
"""

import ipaddress
import re
from functools import lru_cache

import idna
import tldextract

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_LOCAL_NAMES = ("localhost", "local", "internal", "home.arpa")
_LOCAL_ENDINGS = tuple("." + name for name in _LOCAL_NAMES)


def _networks(*names: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(map(ipaddress.ip_network, names))


_NOT_PUBLIC_V4 = _networks(
    "0.0.0.0/8",  # this network
    "10.0.0.0/8",  # private
    "100.64.0.0/10",  # carrier-grade NAT
    "127.0.0.0/8",  # loopback
    "169.254.0.0/16",  # link-local; cloud metadata services
    "172.16.0.0/12",  # private
    "192.0.0.0/24",  # IETF protocols
    "192.0.2.0/24",  # documentation
    "192.88.99.0/24",  # 6to4 relays, withdrawn
    "192.168.0.0/16",  # private
    "198.18.0.0/15",  # benchmarks
    "198.51.100.0/24",  # documentation
    "203.0.113.0/24",  # documentation
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",  # reserved; broadcast
)
# Global unicast. Outside are loopback, unique-local, link-local, site-local, discard-only, SRv6,
# multicast, and blocks that IANA has not allocated yet.
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = _networks(
    "2001::/23",  # IETF protocols: Teredo, benchmarks, ORCHID
    "2001:db8::/32",  # documentation
    "3fff::/20",  # documentation
)
# IPv6 networks whose addresses end with an IPv4 address: IPv4-compatible, IPv4-mapped, NAT64
_EMBEDDED_V4 = _networks("::/96", "::ffff:0:0/96", "64:ff9b::/96")
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})  # RFC 5214: bits 64 to 95, before an IPv4 address


def is_private_address(address: str) -> bool:
    """Whether an IP address is not public; an IPv4 address inside an IPv6 address counts as IPv4.

    Raises ValueError if `address` is not an IP address.
    """
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv4Address):
        return any(ip in network for network in _NOT_PUBLIC_V4)
    if ip.scope_id is not None:  # zones are local to one machine
        return True
    if ip.sixtofour:
        return is_private_address(str(ip.sixtofour))
    last = str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
    if any(ip in network for network in _EMBEDDED_V4):
        return is_private_address(last)
    if (int(ip) >> 32) & 0xFFFFFFFF in _ISATAP and is_private_address(last):
        return True
    return ip not in _PUBLIC_V6 or any(ip in network for network in _NOT_PUBLIC_V6)


def is_address(host: str) -> bool:
    """Whether a normalised host is an IP address, not a name."""
    return ":" in host or host.rpartition(".")[2].isdigit()


def is_private_host(host: str) -> bool:
    """Whether a normalised host is a non-public address or a local name (`localhost`)."""
    if is_address(host):
        return is_private_address(host)
    return host in _LOCAL_NAMES or host.endswith(_LOCAL_ENDINGS)


def ascii_host(host: str) -> str:
    """Normalise a host name or address (IPv6 in brackets). Raises ValueError if it is neither."""
    host = ascii_name(host).removesuffix(".")
    if host.startswith("["):
        if "%" in host:
            raise ValueError("an address with a zone")  # RFC 6874: zones are local to one machine
        return str(ipaddress.IPv6Address(host[1:-1]))
    _, dot, last = host.rpartition(".")
    if last.isdigit() or last.startswith("0x"):
        return str(ipaddress.IPv4Address(host))  # raises for 999.999.999.999, 127.1 and 0x7f.1
    if len(host) > 253 or not _NAME.fullmatch(host):
        raise ValueError("bad host name")
    if not dot and host not in _LOCAL_NAMES:
        raise ValueError("a host name needs a domain")
    return host


def ascii_name(name: str) -> str:
    """Lower-case and IDNA-encode a name. Raises ValueError if that fails."""
    return name.lower() if name.isascii() else idna.encode(name, uts46=True).decode()  # IDNAError is a ValueError


# ------------------------------------------------------------ registered domains

# suffix_list_urls=(), cache_dir=None: never a download, never a lock on a shared home directory
_SNAPSHOT = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)


@lru_cache(1)
def _rules() -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Suffixes, the parents of wildcards (`*.ck`), and the exceptions to those (`!www.ck`)."""
    rules = [".".join(ascii_name(label) for label in rule.split(".")) for rule in _SNAPSHOT.tlds]
    return (
        frozenset(rules),
        frozenset(rule[2:] for rule in rules if rule.startswith("*.")),
        frozenset(rule[1:] for rule in rules if rule.startswith("!")),
    )


def is_public_suffix(host: str) -> bool:
    """Whether domains are registered directly below an ASCII host (`com`, `co.uk`, any label)."""
    suffixes, wildcards, exceptions = _rules()
    parent = host.partition(".")[2]
    return host not in exceptions and (not parent or host in suffixes or parent in wildcards)


def registered_domain(host: str) -> str:
    """The registered domain of an ASCII host; the host if it is an address or a public suffix.

    A top-level domain missing from the list counts as a public suffix (the list's default rule).
    """
    if is_address(host):
        return host
    domain = rest = host
    while not is_public_suffix(rest):
        domain, rest = rest, rest.partition(".")[2]
        if domain in _rules()[2]:
            break
    return domain
