import xxhash
from hypothesis import given
from hypothesis import strategies as st

from common.settings import BlacklistSettings
from corpus.url_list import UrlListRules, shard_of
from corpus.urls import UrlRules

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
    path = draw(st.text("ab/.-%7eE é?&=#", max_size=12))
    ending = draw(
        st.sampled_from(["", ".jpg", ".HTML", "?utm_source=x&a=1", "?a=1&&fbclid", "#part", "%C3%a9", "\x0b", "\r"])
    )
    return f"{scheme}{draw(st.sampled_from(HOSTS))}{draw(st.sampled_from(['', '/', '?']))}{path}{ending}"


@given(st.lists(urls(), min_size=1, max_size=5), st.sampled_from(SETTINGS))
def test_the_short_way_and_the_long_way_agree(lines: list[str], settings: BlacklistSettings) -> None:
    checked = UrlListRules(settings, 7).check("\n".join(lines).encode())
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


def test_lines_that_are_no_utf8_are_malformed_entries() -> None:
    checked = UrlListRules(BlacklistSettings(), 1).check(
        b"http://a.example/1\n\xffhttp://a.example/2\r\n\n# no entry\n"
    )
    assert checked.urls == ["http://a.example/1", "\ufffdhttp://a.example/2"]
    assert checked.verdicts == [0, "malformed"]


def test_every_entry_of_a_dump_is_an_entry_of_the_result() -> None:
    dump = b'{"url":"http://a.example/1","score":5}\n{"score":1}\n{broken\n{"url":"http://a.example/2","score":1}\n'
    checked = UrlListRules(BlacklistSettings(), 1).check(dump)
    assert checked.verdicts == [0, "malformed", "malformed", "score"]
