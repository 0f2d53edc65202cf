import pytest

from common.errors import ConfigError
from corpus.scrape.network import AddressOverrides
from corpus.urls.url import parse_url


@pytest.mark.parametrize("address", ["127.0.0.1", "host:80", "127.0.0.1:", "127.0.0.1:99999", "::1:80x", ""])
def test_an_address_must_be_an_ip_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match=r"scrape\.resolve: one\.example"):
        AddressOverrides({"one.example": address})


def test_resolved_hosts_are_reached_by_plain_http_under_their_own_name() -> None:
    addresses = AddressOverrides({"One.example": "127.0.0.1:8080", "six.example": "[::1]:81"})
    target, headers = addresses.target(parse_url("https://one.example/a%2Fb/ü?x=1&y=%20"))
    assert str(target) == "http://127.0.0.1:8080/a%2Fb/%C3%BC?x=1&y=%20"
    assert headers == {"Host": "one.example"}
    target, headers = addresses.target(parse_url("http://six.example:8000/"))
    assert str(target) == "http://[::1]:81/" and headers == {"Host": "six.example:8000"}
    target, headers = addresses.target(parse_url("https://public.example/x"))
    assert str(target) == "https://public.example/x" and headers == {}


def test_a_star_matches_every_other_host() -> None:
    addresses = AddressOverrides({"*": "127.0.0.1:1", "one.example": "127.0.0.1:2"})
    assert addresses.get("one.example") == "127.0.0.1:2" and addresses.get("any.example") == "127.0.0.1:1"
