import pytest
import tldextract
from hypothesis import given
from hypothesis import strategies as st

from corpus.urls.public_suffix import registered_domain

LIBRARY = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
RULES = sorted(rule for rule in LIBRARY.tlds if rule.isascii())
LABELS = st.sampled_from(["www", "example", "a-1", "city", "kobe", "co", "xn--fiqs8s", "b"])


@pytest.mark.parametrize(
    ("host", "domain"),
    [
        ("news.bbc.co.uk", "bbc.co.uk"),
        ("co.uk", "co.uk"),
        ("www.handbook.example", "handbook.example"),  # an unlisted top-level domain counts as a suffix
        ("example", "example"),
        ("10.0.0.1", "10.0.0.1"),
        ("2606:2800::1", "2606:2800::1"),
        ("a.b.c.ck", "b.c.ck"),  # *.ck
        ("c.ck", "c.ck"),
        ("sub.www.ck", "www.ck"),  # !www.ck
        ("www.example.xn--fiqs8s", "example.xn--fiqs8s"),
    ],
)
def test_registered_domains_follow_the_public_suffix_list(host: str, domain: str) -> None:
    assert registered_domain(host) == domain


@given(st.lists(LABELS, max_size=3), st.sampled_from(RULES))
def test_every_rule_gives_what_tldextract_gives(labels: list[str], rule: str) -> None:
    host = ".".join([*labels, rule.removeprefix("!").replace("*", "any")])
    assert registered_domain(host) == (LIBRARY(host).top_domain_under_public_suffix or host)
