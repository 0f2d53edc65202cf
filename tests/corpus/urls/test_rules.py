import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from common.errors import InputError
from common.settings import BlacklistSettings
from corpus.urls.rules import UrlRules
from corpus.urls.url import canonical_url, document_id, parse_url

RULES = UrlRules(BlacklistSettings())


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://", "malformed"),
        ("no scheme at all", "malformed"),
        ("www.example.org/page", "malformed"),
        ("http://a b.org/", "malformed"),
        ("http://example.org/a b", "malformed"),
        ("http://999.999.999.999/page", "malformed"),
        ("http://0x7f.1/page", "malformed"),
        ("http://2130706433/page", "malformed"),
        ("http://user:password@example.org/", "malformed"),
        ("http://example.org:99999/", "malformed"),
        ("http://example.org:port/", "malformed"),
        ("http://[::1/page", "malformed"),
        ("http://a..org/page", "malformed"),
        ("http://-a.org/page", "malformed"),
        ("http://nodomain/page", "malformed"),
        ("ftp://999.1.1.1/file", "malformed"),
        ("http://example.org:0/page", "malformed"),
        ("http://[fe80::1%25eth0]/page", "malformed"),
        ("http://example.org/half\ud800", "malformed"),
        ("ftp://example.org/page", "scheme"),
        ("mailto:somebody@example.org", "scheme"),
        ("javascript:void(0)", "scheme"),
        ("http://localhost/page", "private_host"),
        ("http://127.0.0.1/page", "private_host"),
        ("http://10.1.2.3/page", "private_host"),
        ("http://169.254.169.254/latest/meta-data", "private_host"),
        ("http://[::1]/page", "private_host"),
        ("http://[::ffff:10.0.0.1]/page", "private_host"),
        ("http://printer.local/page", "private_host"),
        ("http://service.internal/page", "private_host"),
        ("http://www.youtube.com/watch?v=1", "domain"),
        ("https://m.facebook.co.uk/page", "domain"),
        ("http://example.org/picture.JPG?size=big", "extension"),
        ("http://example.org/archive.7z", "extension"),
        ("http://example.org/drawing.ai", "extension"),
        ("http://example.org/movie.tar.gz", "extension"),
        ("http://youtube.example.org/page", None),
        ("http://example.org/page?file=picture.jpg", None),
        ("http://my_blog.example.org/", None),
        ("http://93.184.216.34/page", None),
        ("http://müller.de/straße", None),
        ("https://example.org:8443/page", None),
    ],
)
def test_the_first_reason_to_drop_a_url(url: str, reason: str | None) -> None:
    assert RULES.reason(url) == reason


def test_short_urls_are_dropped_by_the_configured_length() -> None:
    assert UrlRules(BlacklistSettings(min_length=20)).reason("http://a.org/") == "short"
    assert UrlRules(BlacklistSettings(min_length=13)).reason("http://a.org/") is None


def test_user_lists_add_domains_names_and_extensions() -> None:
    rules = UrlRules(BlacklistSettings(extra_domains=["example.org", "Spam"], extra_extensions=[".WEB"]))
    assert rules.reason("http://www.example.org/page") == "domain"
    assert rules.reason("http://example.com/page") is None
    assert rules.reason("http://spam.co.uk/page") == "domain"
    assert rules.reason("http://example.com/page.web") == "extension"


def test_user_lists_drop_by_suffix_pattern_and_file(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("# mine\nbücher.example  # a shop\nNews\n")
    rules = UrlRules(
        BlacklistSettings(
            domain_lists=[tmp_path / "mine.txt"],
            extra_suffixes=["blogs.example.com", ".gov.au"],
            extra_patterns=["/tag/"],
        )
    )
    assert rules.reason("http://www.bücher.example/page") == "domain"
    assert rules.reason("http://news.co.uk/page") == "domain"
    assert rules.reason("http://a.blogs.example.com/page") == rules.reason("http://blogs.example.com/page") == "domain"
    assert rules.reason("http://my-blogs.example.com/page") is None
    assert rules.reason("http://www.health.gov.au/page") == "domain"
    assert rules.reason("http://example.com/tag/cats") == "pattern"
    assert rules.reason("http://example.com/tags") is None


def test_bad_user_lists_are_named() -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        BlacklistSettings(extra_patterns=["("])
    with pytest.raises(ValidationError, match="extra_extensions"):
        BlacklistSettings(extra_extensions=["jpg"])
    with pytest.raises(InputError, match=r"none\.txt: no such file"):
        UrlRules(BlacklistSettings(domain_lists=[Path("none.txt")]))


def test_private_hosts_pass_when_allowed() -> None:
    assert UrlRules(BlacklistSettings(allow_private_hosts=True)).reason("http://127.0.0.1:8000/page") is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://example.org/a", "https://www.example.org/a#part"),
        ("HTTP://EXAMPLE.org:80/a", "http://example.org/a"),
        ("http://example.org", "http://example.org/"),
        ("http://example.org/%7euser/%C3%A9", "http://example.org/~user/é"),
        ("http://example.org/a?utm_source=x&b=1&fbclid=2", "http://example.org/a?b=1"),
        ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ("http://example.org./a", "http://example.org/a"),
        ("http://example.org/x/../a/./b", "http://example.org/a/b"),
        ("http://example.org/x/%2E%2e/a", "http://example.org/a"),
        ("http://example.org/x\\..\\a", "http://example.org/a"),
        ("http://example.org/a/b/..", "http://example.org/a/"),
    ],
)
def test_urls_of_one_page_have_one_canonical_form(one: str, other: str) -> None:
    assert canonical_url(one) == canonical_url(other)
    assert document_id(one) == document_id(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://example.org/a", "http://example.org/A"),
        ("http://example.org/a?b=1", "http://example.org/a?b=2"),
        ("http://example.org/a%2Fb", "http://example.org/a/b"),
        ("http://example.org:8080/a", "http://example.org/a"),
        ("http://a.example.org/", "http://b.example.org/"),
    ],
)
def test_urls_of_different_pages_differ(one: str, other: str) -> None:
    assert canonical_url(one) != canonical_url(other)


@given(st.text())
def test_any_text_is_kept_or_dropped_with_a_reason(text: str) -> None:
    for url in (text, f"http://{text}", f"http://example.org/{text}"):
        parsed, reason = RULES.check(url)
        assert (parsed is None) == (reason == "malformed")
        if parsed is not None and parsed.host:
            again = parse_url("http://" + parsed.canonical)
            assert again.canonical == parsed.canonical, "the canonical form is its own canonical form"


def test_submissions_of_2005_are_well_formed(shared_data: Path) -> None:
    lines = (shared_data / "urls" / "submissions.jsonl").read_text().splitlines()
    reasons = [RULES.reason(json.loads(line)["url"]) for line in lines]
    assert reasons.count("malformed") == 0
    assert reasons.count(None) > 1100
