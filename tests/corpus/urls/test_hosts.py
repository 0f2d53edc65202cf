import ipaddress

import tldextract
from hypothesis import given
from hypothesis import strategies as st

from common.settings import BlacklistSettings
from corpus.urls.hosts import is_private_address, registered_domain
from corpus.urls.rules import UrlRules

# IANA's registries of special-purpose addresses; of IPv6, only 2000::/3 is allocated
NOT_PUBLIC = (
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 "
    "192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 "
    "::/3 2001::/23 2001:db8::/32 3fff::/20 4000::/2 8000::/1"
)


def test_exactly_the_addresses_of_the_registries_are_not_public() -> None:
    networks = [ipaddress.ip_network(text) for text in NOT_PUBLIC.split()]
    for network in networks:
        first, last = int(network[0]), int(network[-1])
        for number in {first, last, max(first - 1, 0), min(last + 1, 2**network.max_prefixlen - 1)}:
            address = type(network[0])(number)
            assert is_private_address(str(address)) == any(address in other for other in networks), address
    for address in "fe80::1%eth0 2606:4700::1%2 fd00::1 fec0::1 ff02::1 64:ff9b:1::808:808 ::ffff:0:127.0.0.1".split():
        assert is_private_address(address), address


@given(st.ip_addresses(v=4) | st.sampled_from([ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv4Address("8.8.8.8")]))
def test_an_embedded_ipv4_address_is_judged_as_ipv4(address: ipaddress.IPv4Address) -> None:
    low, private = int(address), is_private_address(str(address))
    assert private or address.is_global
    embedding = {
        "IPv4-compatible": low,
        "IPv4-mapped": 0xFFFF << 32 | low,
        "NAT64": 0x0064FF9B << 96 | low,
        "6to4": 0x2002 << 112 | low << 80 | 1,
        "ISATAP": 0x26064700 << 96 | 0x5EFE << 32 | low,
    }
    for name, number in embedding.items():
        assert is_private_address(str(ipaddress.IPv6Address(number))) == private, name


def test_no_spelling_of_a_private_host_passes() -> None:
    rules = UrlRules(BlacklistSettings())
    spellings = (
        "0x7f.1 0X7F.0.0.1 017700000001 0177.0.0.1 2130706433 127.1 127.0.0.1. 127.0.0.1.. 127.0.0.01 127.0.0.0x1 "
        "%31%32%37.0.0.1 １２７.0.0.1 127。0。0。1 ①②⑦.0.0.1 ２１３０７０６４３３ localhost LOCALHOST. a.localhost "
        "ｌｏｃａｌｈｏｓｔ printer.local x.internal router.home.arpa [::1] [::ffff:127.0.0.1] [fe80::1%25eth0]"
    )
    for host in spellings.split():
        for url in (f"http://{host}/page", f"https://{host}:8443/page"):
            assert rules.reason(url) in ("malformed", "private_host"), url


LIBRARY = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
RULES = sorted(rule for rule in LIBRARY.tlds if rule.isascii())
LABELS = st.sampled_from(["www", "example", "a-1", "city", "kobe", "co", "xn--fiqs8s", "b"])


@given(
    st.lists(LABELS, max_size=3),
    st.sampled_from(RULES) | st.sampled_from(["co.uk", "*.ck", "!www.ck"]),
)
def test_every_rule_gives_what_tldextract_gives(labels: list[str], rule: str) -> None:
    host = ".".join([*labels, rule.removeprefix("!").replace("*", "any")])
    assert registered_domain(host) == (LIBRARY(host).top_domain_under_public_suffix or host)
