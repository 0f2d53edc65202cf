import gzip
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import InputError
from corpus.scrape.response import FetchedPage
from corpus.scrape.warc import read_pages
from tests.warc_records import http, record, write_warc

HTML = b"<p>Hello</p>"
LIMIT = 100_000
URL = "https://one.example/a"


def names(path: Path) -> list[str]:
    """The URL of each page, or the reason of a response without a page."""
    return [found if isinstance(found, str) else url for url, found in read_pages(path, LIMIT)]


def chunked(body: bytes) -> bytes:
    half = len(body) // 2
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:], b""))


@pytest.mark.parametrize(
    "answer",
    [
        http(gzip.compress(HTML, mtime=0), Content_Encoding="gzip"),
        http(zlib.compress(HTML), Content_Encoding="deflate"),
        http(chunked(HTML), Transfer_Encoding="chunked"),
        http(chunked(gzip.compress(HTML, mtime=0)), Transfer_Encoding="Chunked", Content_Encoding="gzip"),
        # Common Crawl stores decoded bodies: today with the original headers renamed …
        http(HTML, X_Crawler_Content_Encoding="gzip", X_Crawler_Transfer_Encoding="chunked"),
        # … until 2018 with the original headers
        http(HTML, Content_Encoding="gzip"),
        http(HTML, Content_Encoding="deflate", Transfer_Encoding="chunked"),
        http(HTML, Content_Encoding="br"),
    ],
)
def test_a_body_is_decoded_if_its_header_is_true(tmp_path: Path, answer: bytes) -> None:
    (found,) = read_pages(write_warc(tmp_path / "one.warc.gz", record(URL, answer)), LIMIT)
    assert isinstance(found[1], FetchedPage) and found[1].body == HTML


@pytest.mark.parametrize(
    ("reason", "block"),
    [
        ("http_404", http(b"gone", status="404 Not Found")),
        ("http_301", http(status="301 Moved", Location="/b")),
        ("content_type", http(b"\x89PNG", Content_Type="image/png")),
        ("content_type", http(b"%PDF-1.4 says it is HTML")),
        ("content_type", b"HTTP/1.1 200 OK\r\n\r\n<p>no type"),
        ("too_large", http(b"x" * (LIMIT + 1))),
        ("too_large", http(gzip.compress(bytes(LIMIT + 1), mtime=0), Content_Encoding="gzip")),
        ("bad_encoding", http(gzip.compress(HTML, mtime=0)[:-9], Content_Encoding="gzip")),
        ("bad_response", b""),
        ("bad_response", b"220 smtp.example ESMTP"),
        ("bad_response", b"SSH-2.0-OpenSSH_9.2\r\n"),
    ],
)
def test_a_response_without_a_page_has_a_reason(tmp_path: Path, reason: str, block: bytes) -> None:
    path = write_warc(tmp_path / "one.warc.gz", record(URL, block), record(f"{URL}/next", http(HTML)))
    assert next(read_pages(path, LIMIT)) == (URL, reason)
    assert names(path) == [reason, f"{URL}/next"]


def test_records_other_than_complete_http_responses_are_skipped_or_have_a_reason(tmp_path: Path) -> None:
    path = write_warc(
        tmp_path / "mixed.warc",
        record("", b"software: x", kind="warcinfo"),
        record(URL, b"GET /a HTTP/1.1\r\n\r\n", kind="request"),
        record("dns:one.example", b"20261101 one.example. A 192.0.2.1"),
        record(f"<{URL}>", http(HTML)),
        record(URL, b"fetchTimeMs: 10", kind="metadata"),
        record(f"{URL}/long", http(HTML), WARC_Truncated="length"),
        record(URL, http(), kind="revisit"),
        record(f"{URL}/last", http(HTML)),
    )
    assert names(path) == ["scheme", URL, "truncated", f"{URL}/last"]


# ------------------------------------------------------------------------------------------------ damage

RECORDS = [record(f"https://one.example/{n}", http(HTML + bytes(str(n), "ascii") * 900)) for n in range(5)]
PAGES = [f"https://one.example/{n}" for n in range(5)]


def test_a_damaged_record_costs_only_itself_and_is_located(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_warc(tmp_path / "five.warc.gz", *RECORDS)
    content = bytearray(path.read_bytes())
    start = len(b"".join(gzip.compress(each, mtime=0) for each in RECORDS[:2]))
    content[start + 60 : start + 80] = bytes(20)
    path.write_bytes(content)
    assert names(path) == [*PAGES[:2], "damaged", *PAGES[3:]]
    assert f"{path}: the record at byte {start} is damaged" in capsys.readouterr().err


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_goes_unnoticed_or_spreads(tmp_path: Path, data: st.DataObject) -> None:
    path = write_warc(tmp_path / "five.warc.gz", *RECORDS)
    good = dict(read_pages(path, LIMIT))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        found = list(read_pages(path, LIMIT))
    except InputError:
        return
    assert sum(url in good and good[url] == answer for url, answer in found) >= 4
    assert all(answer == "damaged" or good[url] == answer for url, answer in found)


@pytest.mark.parametrize("name", ["five.warc.gz", "five.warc"])
def test_a_truncated_file_is_refused_with_the_offset(tmp_path: Path, name: str) -> None:
    path = write_warc(tmp_path / name, *RECORDS)
    content = path.read_bytes()
    last = len(content) - len(gzip.compress(RECORDS[4], mtime=0) if name.endswith(".gz") else RECORDS[4])
    for kept in (1, 2, 40, (len(content) - last) // 2, len(content) - last - 5):
        path.write_bytes(content[: last + kept])
        expected = (
            f"ends inside the record at byte {last};" if path.suffix == ".gz" or kept > 9 else "after the first 4"
        )
        with pytest.raises(InputError, match=f"{name}: .*{expected}"):
            names(path)
    path.write_bytes(content[:last])
    assert names(path) == PAGES[:4]


def test_a_file_of_one_gzip_member_is_read_and_refused_if_damaged(tmp_path: Path) -> None:
    path = tmp_path / "stream.warc.gz"
    content = bytearray(gzip.compress(b"".join(RECORDS * 100), compresslevel=0, mtime=0))
    path.write_bytes(content)
    assert names(path) == PAGES * 100
    content[-3000] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="no WARC record after the first"):
        names(path)


@pytest.mark.parametrize(
    "content", [b"<html>\n", gzip.compress(b"a text\n", mtime=0), bytes(5000), b"WARC/9.9\r\n\r\n"]
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.warc.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"odd\.warc\.gz: no WARC record at its beginning"):
        names(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            gzip.compress(b"filedesc://a.arc 0 19960923142103 text/plain 76\n1 0 x\n", mtime=0),
            "ARC; convert it: warcio",
        ),
        (zstandard.compress(b"WARC/1.0\r\n"), "zstd-compressed; decompress it"),
    ],
)
def test_a_file_of_a_known_kind_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "odd").write_bytes(content)
    with pytest.raises(InputError, match=f"odd: {problem}"):
        names(tmp_path / "odd")
