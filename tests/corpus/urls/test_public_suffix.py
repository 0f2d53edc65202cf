import tldextract
from hypothesis import given
from hypothesis import strategies as st

from corpus.urls.public_suffix import registered_domain

LIBRARY = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
RULES = sorted(rule for rule in LIBRARY.tlds if rule.isascii())
LABELS = st.sampled_from(["www", "example", "a-1", "city", "kobe", "co", "xn--fiqs8s", "b"])


@given(st.lists(LABELS, max_size=3), st.sampled_from(RULES) | st.sampled_from(["co.uk", "*.ck", "!www.ck"]))
def test_every_rule_gives_what_tldextract_gives(labels: list[str], rule: str) -> None:
    host = ".".join([*labels, rule.removeprefix("!").replace("*", "any")])
    assert registered_domain(host) == (LIBRARY(host).top_domain_under_public_suffix or host)


def test_an_address_is_its_own_domain_and_an_unlisted_ending_is_a_suffix() -> None:
    hosts = {"10.0.0.1": "10.0.0.1", "2606:2800::1": "2606:2800::1", "example": "example", "sub.www.ck": "www.ck"}
    hosts |= {"www.handbook.example": "handbook.example", "a.b.c.ck": "b.c.ck", "c.ck": "c.ck", "co.uk": "co.uk"}
    assert {host: registered_domain(host) for host in hosts} == hosts
