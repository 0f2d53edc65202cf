import json
from pathlib import Path

import orjson
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from common.settings import BlacklistSettings
from corpus.urls.bulk_rules import BulkUrlRules, shard_of
from corpus.urls.rules import UrlRules
from corpus.urls.url import canonical_url

HOSTS = (
    "example.org www.example.org Example.ORG example.org. www.youtube.com m.facebook.co.uk a.org 10.0.0.1 8.8.8.8 1.2 "
    "printer.local localhost nodomain a..org -a.org a_b.org bücher.example example.org:80 example.org:81 [::1] u@a.org"
).split()
SETTINGS = (
    BlacklistSettings(),
    BlacklistSettings(min_length=30, extra_suffixes=["a.org"]),
    BlacklistSettings(extra_patterns=["b{2}"], allow_private_hosts=True),
)


@st.composite
def urls(draw: st.DrawFn) -> str:
    scheme = draw(st.sampled_from(["http://", "https://", "HTTP://", "ftp://", "http:/", "mailto:", ""]))
    path = draw(
        st.text("ab/.-%7eE é?&=#", max_size=12) | st.sampled_from(["x/../a", "./a", "%2e%2E/a", "a/.", ".a/..b"])
    )
    ending = draw(
        st.sampled_from(["", ".jpg", ".HTML", "?utm_source=x&a=1", "?a=1&&fbclid", "#part", "%C3%a9", "\x0b", "\r"])
    )
    return f"{scheme}{draw(st.sampled_from(HOSTS))}{draw(st.sampled_from(['', '/', '?']))}{path}{ending}"


@given(st.lists(urls(), min_size=1, max_size=5), st.sampled_from(SETTINGS))
def test_the_fast_path_and_the_slow_path_agree(lines: list[str], settings: BlacklistSettings) -> None:
    checked = BulkUrlRules(settings, 7).check("\n".join(lines).encode())
    expected_urls, expected_verdicts, expected_hashes = [], [], []
    for line in lines:
        url, reason = UrlRules(settings).check(line)
        expected_urls.append(line.strip() if url is None or reason else url.text)
        expected_verdicts.append(reason if url is None or reason else shard_of(url.host, 7))
        if url is not None and reason is None:
            expected_hashes.append(xxhash.xxh3_64_intdigest(url.canonical.encode()))
    assert checked.urls == expected_urls
    assert checked.verdicts == expected_verdicts
    assert checked.hashes == expected_hashes


def test_lines_that_are_not_utf8_are_malformed() -> None:
    checked = BulkUrlRules(BlacklistSettings(), 1).check(
        b"http://a.example/1\n\xffhttp://a.example/2\r\n\n# no entry\n"
    )
    assert checked.urls == ["http://a.example/1", "\ufffdhttp://a.example/2"]
    assert checked.verdicts == [0, "malformed"]


def test_every_entry_of_a_dump_is_an_entry_of_the_result() -> None:
    dump = b'{"url":"http://a.example/1","score":5}\n{"score":1}\n{broken\n{"url":"http://a.example/2","score":1}\n'
    checked = BulkUrlRules(BlacklistSettings(), 1).check(dump)
    assert checked.verdicts == [0, "malformed", "malformed", "score"]


def submission(**fields: object) -> tuple[str, int | str]:
    """The URL of one submission of a dump, and its shard (0) or the reason to drop it."""
    line = {"url": "http://a.example/page", "score": 3, "over_18": False, "is_self": False, **fields}
    checked = BulkUrlRules(BlacklistSettings(), 1).check(orjson.dumps(line) + b"\n")
    assert len(checked.urls) == len(checked.verdicts) == 1 and len(checked.hashes) == checked.verdicts.count(0)
    return checked.urls[0], checked.verdicts[0]


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("http://a.example/?x=1&amp;y=2", "http://a.example/?x=1&y=2"),
        ("http://a.example/?x=1&amp;copy=2&copy=3&reg;", "http://a.example/?x=1&copy=2&copy=3&reg;"),
        ("http://a.example/?q=&lt;b&gt;", "http://a.example/?q=<b>"),
        (
            "http://a.example/?q=&amp;lt;&amp;amp;",
            "http://a.example/?q=&lt;&amp;",
        ),  # unescaped only once
        ("  http://a.example/page \n", "http://a.example/page"),
    ],
)
def test_the_url_of_a_submission_is_the_one_that_was_posted(url: str, meant: str) -> None:
    assert submission(url=url) == (meant, 0)


def test_a_url_line_is_not_unescaped() -> None:
    line = "http://a.example/?x=1&amp;y=2"
    assert BulkUrlRules(BlacklistSettings(), 1).check(line.encode()).urls == [line]


def test_the_escaped_and_the_plain_form_of_a_url_are_one_page() -> None:
    checked = BulkUrlRules(BlacklistSettings(), 1).check(
        b'{"url": "http://a.example/?x=1&amp;y=2"}\nhttp://a.example/?x=1&y=2\n'
    )
    assert len(set(checked.hashes)) == 1 and len(checked.hashes) == 2


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        *(({"score": value}, 0) for value in (3, 3.0, "3", " 12 ", "3.5", "+4", "1e3")),
        *(({"score": value}, "score") for value in (2, 2.9, "2", "-7", "0", "2.99")),
        *(({"score": value}, "malformed") for value in (None, "", "many", "nan", "inf", "1_000", True, [9], {})),
        *(({"over_18": value}, "over_18") for value in (True, "true", "True", 1, "1", 1.0, "yes")),
        *(({"over_18": value}, 0) for value in (False, "false", "False", 0, "0", 0.0, "no", None, "", "null")),
        *(({"over_18": value}, "malformed") for value in ("maybe", 7, [], {})),
        *(({"is_self": value}, "self_post") for value in (True, "true", "1")),
        *(({"is_self": value}, 0) for value in (False, "false", "0", None)),
        *(({"url": value}, "malformed") for value in ("", None, 5, "[deleted]", "default")),
        ({"url": "", "url_overridden_by_dest": "http://a.example/x"}, 0),
        ({"url": "/r/pics/comments/1/a_crosspost/"}, "domain"),
    ],
)
def test_fields_of_a_submission_may_be_booleans_numbers_or_strings(
    fields: dict[str, object], verdict: int | str
) -> None:
    assert submission(**fields)[1] == verdict


def test_an_old_submission_without_is_self_is_known_by_its_url() -> None:
    own = {"url": "http://reddit.com/r/books/comments/1/x/", "domain": "self.books"}
    magazine = {"url": "http://www.self.com/page", "domain": "self.com"}
    lines = orjson.dumps(own) + b"\n" + orjson.dumps(magazine)
    assert BulkUrlRules(BlacklistSettings(), 1).check(lines).verdicts == ["domain", 0]


def test_no_url_of_a_real_dump_stays_escaped(shared_data: Path) -> None:
    dump = (shared_data / "urls" / "submissions.jsonl").read_bytes()
    checked = BulkUrlRules(BlacklistSettings(), 1).check(dump)
    kept = [url for url, verdict in zip(checked.urls, checked.verdicts, strict=True) if verdict == 0]
    assert dump.count(b"&amp;") > 300 and len(kept) > 800
    assert not [url for url in kept if "&amp;" in url]
    posted = {json.loads(line)["url"].replace("&amp;", "&") for line in dump.decode().splitlines()}
    assert {canonical_url(url) for url in kept} <= {canonical_url(url) for url in posted}
