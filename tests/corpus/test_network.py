import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from corpus.network import Addresses, PageError, decode_body
from corpus.urls import parse_url


@pytest.mark.parametrize("address", ["127.0.0.1", "host:80", "127.0.0.1:", "127.0.0.1:99999", "::1:80x", ""])
def test_an_address_must_be_an_ip_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match=r"scrape\.resolve: one\.example"):
        Addresses({"one.example": address})


def test_resolved_hosts_are_reached_by_plain_http_under_their_own_name() -> None:
    addresses = Addresses({"One.example": "127.0.0.1:8080", "six.example": "[::1]:81"})
    target, headers = addresses.target(parse_url("https://one.example/a%2Fb/ü?x=1&y=%20"))
    assert str(target) == "http://127.0.0.1:8080/a%2Fb/%C3%BC?x=1&y=%20"
    assert headers == {"Host": "one.example"}
    target, headers = addresses.target(parse_url("http://six.example:8000/"))
    assert str(target) == "http://[::1]:81/" and headers == {"Host": "six.example:8000"}
    target, headers = addresses.target(parse_url("https://public.example/x"))
    assert str(target) == "https://public.example/x" and headers == {}


def test_a_star_stands_for_every_other_host() -> None:
    addresses = Addresses({"*": "127.0.0.1:1", "one.example": "127.0.0.1:2"})
    assert addresses.given("one.example") == "127.0.0.1:2" and addresses.given("any.example") == "127.0.0.1:1"


@given(st.binary(max_size=2000))
def test_every_body_survives_its_encodings(body: bytes) -> None:
    raw = zlib.compressobj(wbits=-15)
    encoded = {
        "": body,
        "identity": body,
        "gzip": gzip.compress(body),
        "X-GZIP ": gzip.compress(body),
        "deflate": zlib.compress(body),
    }
    for encoding, sent in encoded.items():
        assert decode_body(sent, encoding, len(body)) == body
    assert decode_body(raw.compress(body) + raw.flush(), "deflate", len(body)) == body


def test_a_body_over_the_cap_is_given_up_at_the_cap() -> None:
    with pytest.raises(PageError, match="too_large"):
        decode_body(gzip.compress(bytes(1001)), "gzip", 1000)
    with pytest.raises(PageError, match="too_large"):
        decode_body(bytes(1001), "", 1000)
    assert len(decode_body(gzip.compress(bytes(1000)), "gzip", 1000)) == 1000
