import tldextract
from hypothesis import given
from hypothesis import strategies as st

from corpus.urls.hosts import registered_domain

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
