import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.settings import BlacklistSettings
from corpus.urls.rules import SeenUrls, UrlRules
from corpus.urls.url import document_id, parse_url

RULES = UrlRules(BlacklistSettings())
URLS = {
    "malformed": "www.example.org/page http://999.999.999.999/page http://[::1/page http://user:word@example.org/ "
    "http://example.org:65536/ http://example.org:0/ http://a..org/page http://-a.org/page http://nodomain/page",
    "scheme": "ftp://example.org/page mailto:somebody@example.org javascript:void(0)",
    "private_host": "http://localhost/page http://127.0.0.1/page http://[::ffff:10.0.0.1]/page http://printer.local/",
    "domain": "http://www.youtube.com/watch?v=1 https://m.facebook.co.uk/page",
    "extension": "http://example.org/picture.JPG?size=big http://example.org/a.7z http://example.org/movie.tar.gz",
    None: "http://youtube.example.org/page http://example.org/page?file=picture.jpg http://my_blog.example.org/ "
    "http://93.184.216.34/page http://müller.de/straße https://example.org:65535/page",
}


def test_urls_are_dropped_for_their_reason() -> None:
    given = {url: reason for reason, urls in URLS.items() for url in urls.split()}
    given |= {f"http://{'a' * 63}.org/": None, f"http://{'a' * 64}.org/": "malformed"}
    given |= dict.fromkeys(["http://a b.org/", "http://a.org/a\tb", "http://a.org/\ud800"], "malformed")
    assert {url: RULES.reason(url) for url in given} == given
    assert UrlRules(BlacklistSettings(allow_private_hosts=True)).reason("http://127.0.0.1:8000/page") is None


def test_the_first_reason_counts_from_malformed_to_the_optional_rules() -> None:
    optional = BlacklistSettings(
        min_length=24, extra_domains=["10.0.0.1", "Spam"], extra_extensions=[".WEB"], extra_patterns=["p[.]web"]
    )
    expected = {
        "ftp://10.0..1/p.web": "malformed",
        "ftp://10.0.0.1/p.web": "scheme",
        "http://10.0.0.1/1/p.web": "short",  # 23 characters
        "http://10.0.0.1/11/p.web": "private_host",
        "http://spam.co.uk/aa/p.web": "domain",
        "http://good.co.uk/aa/p.web": "extension",
        "http://good.co.uk/p.web/aa": "pattern",
        "http://good.co.uk/page/a": None,
    }
    assert {url: UrlRules(optional).reason(url) for url in expected} == expected


SAME = [
    ("http://example.org/a", "https://www.example.org/a#part"),
    ("HTTP://EXAMPLE.org:80", "http://example.org/"),
    ("http://example.org/%7euser/%C3%A9", "http://example.org/~user/é"),
    ("http://example.org/a?utm_source=x&b=1&fbclid=2", "http://example.org/a?b=1"),
    ("http://example.org/a?b=%7e?c", "http://example.org/a?b=~?c"),
    ("http://bücher.example/", "http://xn--bcher-kva.example./"),
    ("http://example.org/a b?c d#e f\tg", "http://example.org/a%20b?c%20d"),  # as browsers request it
    ("http://example.org/x/../a/./b", "http://example.org/x/%2E%2e/a\\b"),
]
DIFFERENT = [
    ("http://example.org/a", "http://example.org/A"),
    ("http://example.org/a?b=1", "http://example.org/a?b=2"),
    ("http://example.org/a%2Fb", "http://example.org/a/b"),
    ("http://example.org:8080/a", "http://example.org/a"),
]


def test_urls_of_one_page_have_one_canonical_form_and_others_differ() -> None:
    for one, other in SAME:
        assert parse_url(one).canonical == parse_url(other).canonical and document_id(one) == document_id(other), one
    for one, other in DIFFERENT:
        assert parse_url(one).canonical != parse_url(other).canonical and document_id(one) != document_id(other), one
    assert document_id("http://example.org/a") == "94584207f807e901"  # existing corpora have it


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 40) | st.sampled_from([2**64 - 1, 2**63]), max_size=30), max_size=12))
def test_seen_urls_are_those_of_a_set(batches: list[list[int]]) -> None:
    seen, known = SeenUrls(), set[int]()
    for batch in batches:
        expected = []
        for value in batch:
            expected.append(value not in known)
            known.add(value)
        assert seen.add(np.array(batch, dtype=np.uint64)).tolist() == expected
