from pathlib import Path

import orjson
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InputError, TruncatedError
from common.files import fingerprint, read_lines
from common.settings import BlacklistSettings
from corpus.blacklist import CheckedUrls, blacklist, check_lines
from corpus.urls.hosts import registered_domain
from corpus.urls.lists import read_urls
from corpus.urls.rules import UrlRules
from corpus.urls.url import parse_url

RULES = BlacklistSettings()
URLS = b"""
# a comment
http://example.org/first
http://example.org/picture.jpg
https://www.example.org/first?utm_source=list
http://other.example/second
not a url
"""


def test_kept_urls_come_out_in_input_order_and_rejects_name_their_reason(tmp_path: Path) -> None:
    source = tmp_path / "urls.txt"
    source.write_bytes(URLS)
    stats = blacklist([source], [tmp_path / "out.txt"], RULES, rejects=tmp_path / "rejects.jsonl")
    assert (tmp_path / "out.txt").read_text() == "http://example.org/first\nhttp://other.example/second\n"
    rejects = [orjson.loads(line) for line in read_lines(tmp_path / "rejects.jsonl")]
    assert [reject["reason"] for reject in rejects] == ["extension", "duplicate", "malformed"]
    assert (stats.documents_in, stats.documents_out) == (5, 2)
    assert dict(stats.reasons) == {"extension": 1, "duplicate": 1, "malformed": 1}
    assert stats.extra["inputs"] == {str(source): fingerprint(source)}


def test_lists_of_shards_show_that_they_are_whole_and_the_statistics_count_their_urls_alone(tmp_path: Path) -> None:
    source, lists = tmp_path / "urls.txt", [tmp_path / "0000.txt", tmp_path / "0001.txt"]
    source.write_text("http://example.org/first\nhttp://example.org/second\n")
    plain, marked = (blacklist([source], lists, RULES, marked=marked) for marked in (False, True))
    assert plain.bytes_out == marked.bytes_out == 2 * len("http://example.org/") + len("firstsecond")
    with_urls, without = sorted(lists, key=lambda path: -path.stat().st_size)
    assert without.read_text() == "# corpus.blacklist\n# end\n" and read_urls(without, allow_empty=True) == []
    assert read_urls(with_urls) == ["http://example.org/first", "http://example.org/second"]
    text = with_urls.read_text()
    for cut in range(len(text) - 1):
        with_urls.write_text(text[:cut])
        with pytest.raises(TruncatedError, match=r"corpus\.blacklist"):
            read_urls(with_urls, allow_empty=True)
    with pytest.raises(InputError, match="no URLs inside"):
        read_urls(without)


def test_a_domain_lives_in_one_shard_and_shards_keep_the_order_whatever_the_workers(tmp_path: Path) -> None:
    urls = [f"http://{sub}.site{number % 7}.example/page-{number}" for number in range(20_000) for sub in ("a", "b")]
    (tmp_path / "urls.txt").write_text("\n".join(urls))  # 1.3 MB: two blocks
    written = {}
    for workers in (1, 2):
        outputs = [tmp_path / str(workers) / f"{shard:04d}.txt" for shard in range(10)]
        rejects = tmp_path / f"{workers}.jsonl"
        assert (
            blacklist([tmp_path / "urls.txt"], outputs, RULES, rejects=rejects, workers=workers).documents_out == 40_000
        )
        written[workers] = [path.read_bytes() for path in (*outputs, rejects)]
    assert written[1] == written[2]
    position, homes = {url: number for number, url in enumerate(urls)}, dict[str, set[Path]]()
    shards = {path: path.read_text().splitlines() for path in outputs}
    assert sorted(url for shard in shards.values() for url in shard) == sorted(urls)
    for path, shard in shards.items():
        assert shard == sorted(shard, key=position.__getitem__)
        for url in shard:
            homes.setdefault(registered_domain(parse_url(url).host), set()).add(path)
    assert len(homes) == 7 and all(len(home) == 1 for home in homes.values())


HOSTS = (
    "example.org www.example.org Example.ORG example.org. www.youtube.com m.facebook.co.uk a.org 10.0.0.1 8.8.8.8 1.2 "
    "printer.local localhost nodomain a..org -a.org a_b.org bücher.example example.org:80 example.org:81 [::1] u@a.org"
).split()
SETTINGS = (
    RULES,
    BlacklistSettings(min_length=30, extra_suffixes=["a.org"]),
    BlacklistSettings(extra_patterns=["b{2}"], allow_private_hosts=True),
)
PATHS = st.text("ab/.-%7eE é?&=#", max_size=12) | st.sampled_from(["x/../a", "./a", "%2e%2E/a", "a/.", ".a/..b"])
ENDINGS = ["", ".jpg", ".HTML", "?utm_source=x&a=1", "?a=1&&fbclid", "#part", "%C3%a9", "\x0b", "\r"]


@st.composite
def urls(draw: st.DrawFn) -> str:
    scheme = draw(st.sampled_from(["http://", "https://", "HTTP://", "ftp://", "http:/", "mailto:", ""]))
    host, start, ending = (draw(st.sampled_from(each)) for each in (HOSTS, ["", "/", "?"], ENDINGS))
    return f"{scheme}{host}{start}{draw(PATHS)}{ending}"


def check(block: bytes, settings: BlacklistSettings = RULES) -> CheckedUrls:
    return check_lines(settings, UrlRules(settings), block)


@settings(max_examples=60)
@given(st.lists(urls(), min_size=1, max_size=20), st.sampled_from(SETTINGS))
def test_the_fast_path_and_the_slow_path_agree(lines: list[str], settings: BlacklistSettings) -> None:
    rules = UrlRules(settings, 7)
    checked = check_lines(settings, rules, "\n".join(lines).encode())
    expected = CheckedUrls()
    for line in lines:
        url, reason = rules.check(line)
        expected.urls.append(line.strip() if url is None or reason else url.text)
        expected.verdicts.append(
            reason if url is None or reason else xxhash.xxh3_64_intdigest(registered_domain(url.host).encode()) % 7
        )
        if url is not None and reason is None:
            expected.hashes.append(xxhash.xxh3_64_intdigest(url.canonical.encode()))
    assert checked == expected


def test_the_fields_of_a_submission_decide_and_may_be_booleans_numbers_or_strings() -> None:
    values: dict[tuple[str, int | str], tuple[object, ...]] = {
        ("score", 0): (3, 3.0, " 12 "),
        ("score", "score"): (2, 2.9, "2", "-7"),
        ("score", "malformed"): (None, "many", "nan", "1_000", True, [9]),
        ("over_18", 0): (False, "false", 0, "0", None, ""),
        ("over_18", "over_18"): (True, "True", 1, "1", "yes"),
        ("is_self", "self_post"): (True, "true", "1"),
        ("url", "malformed"): (None, "[deleted]"),
        ("url", "domain"): ("/r/pics/comments/1/a_crosspost/",),
    }
    usual = {"url": "http://a.example/page", "score": 3, "over_18": False, "is_self": False}
    for (field, verdict), all_given in values.items():
        for value in all_given:
            assert check(orjson.dumps({**usual, field: value})).verdicts == [verdict], (field, value)
    liberal = BlacklistSettings(min_score=2, over_18=True, self_posts=True)
    for change in ({"score": 2}, {"over_18": True}, {"is_self": True}, {"score": "2"}):
        assert check(orjson.dumps(usual | change), liberal).verdicts == [0]
    assert check(orjson.dumps({"url": usual["url"]})).verdicts == [0]
    checked = check(b"http://a.example/1\n\xffhttp://a.example/2\r\n\n# no entry\n{broken\n")
    assert checked.urls == ["http://a.example/1", "\ufffdhttp://a.example/2", "{broken"]
    assert checked.verdicts == [0, "malformed", "malformed"]
    escaped = {**usual, "url": "", "url_overridden_by_dest": "http://a.example/?x=1&amp;copy=2&copy=3"}
    assert check(orjson.dumps(escaped)).urls == ["http://a.example/?x=1&copy=2&copy=3"]
