import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.settings import BlacklistSettings
from corpus.urls.hosts import ascii_host, is_private_address, is_private_host
from corpus.urls.rules import UrlRules

PRIVATE = (
    "0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 127.0.0.1 127.255.255.254 169.254.169.254 172.16.0.1 172.31.255.255 192.0.0.1 "
    "192.0.2.1 192.168.1.1 198.18.0.1 198.19.255.255 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1 "
    "255.255.255.255 :: ::1 fe80::1 febf::1 fec0::1 feff::1 fc00::1 fd00::1 ff02::1 ff0e::1 100::1 100:0:0:1::1 "
    "5f00::1 2001::1 2001:2::1 2001:10::1 2001:20::1 2001:db8::1 3fff::1 3fff:fff::1 4000::1 64:ff9b:1::7f00:1 "
    "64:ff9b:1::808:808 64:ff9b:2::1 ::ffff:0:127.0.0.1 ::ffff:0:0:7f00:1 2001:0:7f00:1:: fe80::1%eth0 2606:4700::1%2"
)
PUBLIC = "93.184.216.34 8.8.8.8 100.63.255.255 172.32.0.1 192.0.1.1 223.255.255.255 2606:2800:220:1::1 2a00::1 3ffe::1"


@pytest.mark.parametrize("address", PRIVATE.split())
def test_addresses_that_are_not_public(address: str) -> None:
    assert is_private_address(address)


@pytest.mark.parametrize("address", PUBLIC.split())
def test_addresses_that_are_public(address: str) -> None:
    assert not is_private_address(address)


def _embedded(address: ipaddress.IPv4Address) -> dict[str, ipaddress.IPv6Address]:
    """The IPv6 addresses that embed an IPv4 address."""
    low = int(address)
    return {
        "IPv4-compatible": ipaddress.IPv6Address(low),
        "IPv4-mapped": ipaddress.IPv6Address(0xFFFF << 32 | low),
        "NAT64": ipaddress.IPv6Address(0x0064FF9B << 96 | low),
        "6to4": ipaddress.IPv6Address(0x2002 << 112 | low << 80 | 1),
        "ISATAP": ipaddress.IPv6Address(0x26064700 << 96 | 0x5EFE << 32 | low),
        "ISATAP, public": ipaddress.IPv6Address(0x26064700 << 96 | 0x02005EFE << 32 | low),
    }


@given(st.one_of(st.ip_addresses(v=4), st.sampled_from([ipaddress.IPv4Address("127.0.0.1")])))
def test_an_embedded_ipv4_address_is_judged_as_ipv4(address: ipaddress.IPv4Address) -> None:
    private = is_private_address(str(address))
    assert private or address.is_global
    for name, outer in _embedded(address).items():
        assert is_private_address(str(outer)) == private, name


@given(st.ip_addresses(v=6))
def test_addresses_that_the_standard_library_does_not_call_global_are_not_public(
    address: ipaddress.IPv6Address,
) -> None:
    embeds = any(int(address) >> shift == head for shift, head in ((32, 0), (32, 0xFFFF), (112, 0x2002)))
    assert embeds or address.is_global or is_private_address(str(address))
    assert (
        embeds
        or not (address.is_link_local or address.is_site_local or address.is_multicast)
        or (is_private_address(str(address)))
    )


@pytest.mark.parametrize(
    "host",
    "0x7f.1 0x7f000001 0X7F.0.0.1 017700000001 0177.0.0.1 2130706433 127.1 127.0.0.1. 127.0.0.1.. 127.0.0.01 "
    "127.0.0.0x1 %31%32%37.0.0.1 127.0.0.1%2f １２７.0.0.1 127。0。0。1 127.0.0.1． ①②⑦.0.0.1 ２１３０７０６４３３ "
    "0ｘ7f.1 localhost LOCALHOST. ｌｏｃａｌｈｏｓｔ a.localhost printer.local [::1] [::127.0.0.1] [fec0::1] "
    "[64:ff9b:1::7f00:1] [::ffff:127.0.0.1] [fe80::1%25eth0] [::1%lo] [2002:7f00:1::] [0:0:0:0:0:0:0:1]".split(),
)
def test_no_spelling_of_a_private_host_passes(host: str) -> None:
    rules = UrlRules(BlacklistSettings())
    assert rules.reason(f"http://{host}/page") in ("malformed", "private_host")
    assert rules.reason(f"https://{host}:8443/page") in ("malformed", "private_host")


def test_a_host_has_one_normalised_form() -> None:
    forms = {"Bücher.Example.": "xn--bcher-kva.example", "８.8.8.8": "8.8.8.8", "[2606:4700:0::1]": "2606:4700::1"}
    assert {given: ascii_host(given) for given in forms} == forms
    assert not any(is_private_host(host) for host in forms.values())
