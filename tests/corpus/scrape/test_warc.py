import gzip
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from common.errors import InputError
from corpus.scrape.archive import read_pages
from tests.warc_records import http, record, write_warc

HTML = b"<p>Hello</p>"
PACKED = gzip.compress(HTML, mtime=0)
LIMIT = 100_000
URL = "https://one.example/a"
URLS = [f"https://one.example/{n}" for n in range(5)]
RECORDS = [record(url, http(HTML + url[-1].encode() * 900)) for url in URLS]
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\0\0\0skip"
PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": partial(gzip.compress, mtime=0),
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def names(path: Path) -> list[str]:
    """The URL of each page, or the reason of a response without a page."""
    return [page if isinstance(page, str) else url for url, page in read_pages(path, LIMIT)]


def test_a_response_without_a_page_has_a_reason_and_other_records_are_skipped(tmp_path: Path) -> None:
    blocks = [
        ("http_404", http(b"gone", status="404 Not Found")),
        ("content_type", http(b"%PDF-1.4 says it is HTML")),
        ("too_large", http(b"x" * (LIMIT + 1))),
        (URL, http(b"x" * LIMIT, status="203 Not Theirs")),
        ("too_large", http(gzip.compress(bytes(LIMIT + 1), mtime=0), Content_Encoding="gzip")),
        ("bad_encoding", http(gzip.compress(HTML, mtime=0)[:-9], Content_Encoding="gzip")),
        ("bad_response", b"220 smtp.example ESMTP"),
        # Common Crawl stores decoded bodies: with renamed headers, until 2018 the original ones
        (URL, http(HTML, X_Crawler_Content_Encoding="gzip", X_Crawler_Transfer_Encoding="chunked")),
        (URL, http(HTML, Content_Encoding="br", Transfer_Encoding="chunked")),
        (URL, http(b"c\r\n" + HTML + b"\r\n0\r\nX: y\r\n\r\n", Transfer_Encoding="Chunked")),
        (URL, http(b"%x\r\n%b\r\n0\r\n\r\n" % (len(PACKED), PACKED), Transfer_Encoding="GZIP, chunked")),
        ("content_type", http(b"\r\n%PDF-1.4")),
        ("content_type", http(PACKED)),
    ]
    others = [
        record(URL, b"GET /a HTTP/1.1\r\n\r\n", kind="request"),
        record(f"{URL}/long", http(HTML), WARC_Truncated="length"),
        record(f"<{URL}/last>", http(HTML)),
    ]
    path = write_warc(tmp_path / "mixed.warc", *(record(URL, block) for _, block in blocks), *others)
    assert names(path) == [*(reason for reason, _ in blocks), "truncated", f"{URL}/last"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_costs_only_its_record_and_is_located(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, data: st.DataObject
) -> None:
    path = write_warc(tmp_path / f"five.warc.{suffix}", *RECORDS)
    good = dict(read_pages(path, LIMIT))
    starts = [write_warc(tmp_path / f"part.{suffix}", *RECORDS[:n]).stat().st_size for n in range(6)]
    number = data.draw(st.integers(0, 4))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(starts[number], starts[number + 1] - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        answers = list(read_pages(path, LIMIT))
    except InputError:  # it may look like a truncated last record, or not like a gzip member
        assert number == 4 or place < starts[number] + 10
        return
    assert sum(url in good and good[url] == answer for url, answer in answers) >= 4
    assert all(answer == "damaged" or good[url] == answer for url, answer in answers)
    located = [int(offset) for offset in re.findall(r": the record at byte (\d+) ", capsys.readouterr().err)]
    assert len(located) == answers.count(("", "damaged"))
    assert all(starts[number] <= offset < starts[number + 1] for offset in located)


@pytest.mark.parametrize("pack", PACK.values())
def test_records_that_share_a_member_are_read_and_damage_there_stops_the_file(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    long = [record(url, http(random.Random(url).randbytes(90_000))) for url in URLS]
    path, packed = tmp_path / "five.warc.packed", pack(b"".join(long))
    flipped = packed[:300_000] + bytes([packed[300_000] ^ 1]) + packed[300_001:]
    path.write_bytes(packed + pack(RECORDS[0]))
    assert names(path) == [*URLS, URLS[0]]
    for damaged in (packed[:-5], packed[:300_000], flipped):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"five\.warc\.packed: (ends inside|damaged after)"):
            names(path)


def test_a_truncated_file_is_refused_with_the_offset(tmp_path: Path) -> None:
    path = write_warc(tmp_path / "five.warc", *RECORDS)
    content = path.read_bytes()
    last = len(content) - len(RECORDS[4])
    for kept in (1, 2, 40, len(RECORDS[4]) // 2, len(RECORDS[4]) - 5):
        path.write_bytes(content[: last + kept])
        with pytest.raises(InputError, match=rf"five\.warc: .*byte {last};|five\.warc: .* first 4;"):
            names(path)
    path.write_bytes(content[:last])
    assert names(path) == URLS[:4]


@pytest.mark.parametrize("pack", PACK.values())
def test_members_may_begin_anywhere_and_be_empty(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path, content = tmp_path / "five.warc.packed", b"".join(RECORDS)
    for size in (1, 500, 1111, 65_280):  # bgzip's
        members = [pack(content[start : start + size]) for start in range(0, len(content), size)]
        path.write_bytes(b"".join(members))
        assert names(path) == URLS
        path.write_bytes(b"".join(members[:-1]) + members[-1][:-1])
        with pytest.raises(InputError, match=r"ends inside"):
            names(path)
    for between in (pack(b""), SKIPPABLE, SKIPPABLE + pack(b"") * 2 + SKIPPABLE, pack(b"\r\n")):
        path.write_bytes(between + between.join(map(pack, RECORDS)) + between)
        assert names(path) == URLS
    between = bytes(512) if pack is PACK["gzip"] else b""  # gzip skips zeros, zstd does not
    path.write_bytes(b"".join(pack(one) + between for one in RECORDS) + bytes(200_000))
    assert names(path) == [*URLS, *["damaged"] * (not between)]


@pytest.mark.parametrize("pack", [bytes, *PACK.values(), None])
def test_a_record_that_cannot_be_read_costs_itself_wherever_it_is(
    tmp_path: Path, pack: Callable[[bytes], bytes] | None
) -> None:
    path, block = tmp_path / "four.warc", http(b"<p>line\n" * 50)
    bad = [record(URL, block, Content_Length="many"), record(URL, block, Content_Length="60"), RECORDS[4][1:]]
    for one in (*bad, b"WARC/1.0\r\nWARC-Type: response\r\n\r\n" + block + b"\r\n\r\n"):
        for place in range(4):
            records, expected = RECORDS[:3], URLS[:3]
            records.insert(place, one)
            expected.insert(place, "damaged")
            path.write_bytes(b"".join(map(pack, records)) if pack else gzip.compress(b"".join(records)))
            assert names(path) == expected
    path.write_bytes((pack or gzip.compress)(bad[2]))
    with pytest.raises(InputError, match=r"four\.warc: no WARC record inside"):
        names(path)


@given(number=st.integers(0, 4), wrong=st.integers(5, 12_000))
def test_a_length_that_is_too_large_costs_its_record_alone_in_a_plain_file(
    tmp_path_factory: pytest.TempPathFactory, number: int, wrong: int
) -> None:
    assume(wrong % len(RECORDS[0]) > 4)  # the bytes between two records: whole records inside another one are its text
    path, block = tmp_path_factory.mktemp("warc") / "five.warc", http(HTML + b"line \n" * 100)
    records = [*RECORDS]
    records[number] = record(URL, block, Content_Length=str(len(block) + wrong))
    path.write_bytes(b"".join(records))
    if number == 4:
        with pytest.raises(InputError, match=r"five\.warc: ends inside"):
            names(path)
    else:
        assert names(path) == [*URLS[:number], "damaged", *URLS[number + 1 :]]


def test_a_zstd_dictionary_at_the_beginning_holds_for_all_frames(tmp_path: Path) -> None:
    path, pack = tmp_path / "five.warc.zst", PACK["zstd"]
    words = zstandard.train_dictionary(1000, [text[at : at + 150] for text in RECORDS for at in range(0, 900, 5)])
    frames = list(map(zstandard.ZstdCompressor(dict_data=words, write_checksum=True).compress, RECORDS))
    for content in (words.as_bytes(), pack(words.as_bytes())):
        first = b"\x5d\x2a\x4d\x18" + len(content).to_bytes(4, "little") + content
        path.write_bytes(first + b"".join([*frames[:2], frames[2][:-1] + b"?", *frames[3:]]))
        assert names(path) == [*URLS[:2], "damaged", *URLS[3:]]
    path.write_bytes(b"".join(frames))
    with pytest.raises(InputError, match=r"five\.warc\.zst: .*Dictionary"):
        names(path)
