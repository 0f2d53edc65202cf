import gzip
from pathlib import Path

import pytest
from warcio.archiveiterator import ArchiveIterator

from common.errors import InputError
from corpus.scrape.archive import Archive, read_pages
from corpus.scrape.response import FetchedPage
from tests.warc_records import http, record, write_warc

HTML = b"<p>Hello</p>"
LIMIT = 100_000
URL = "https://one.example/"


def page(name: str, requested: str = "") -> FetchedPage:
    headers = (("Content-Type", "text/html"), ("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked"))
    raw = gzip.compress(HTML, mtime=0)
    return FetchedPage(URL + name, 200, "OK", headers, "text/html", raw, HTML, requested or URL + name)


def test_responses_are_read_back_unchanged_also_by_other_readers(tmp_path: Path) -> None:
    path = tmp_path / "raw.warc.gz"
    pages = [page("a"), page("b", requested="http://old.example/ä#top")]
    with Archive(path) as archive:
        for each in pages:
            archive.append(each)
    without_chunks = [("Content-Type", "text/html"), ("Content-Encoding", "gzip")]
    for expected, (url, response) in zip(pages, read_pages(path, LIMIT), strict=True):
        assert isinstance(response, FetchedPage) and list(response.headers) == without_chunks
        assert (url, response.url, response.requested) == (expected.requested, expected.url, expected.requested)
        assert (response.status, response.reason, response.raw, response.body) == (200, "OK", expected.raw, HTML)
    with path.open("rb") as file:
        bodies = [each.content_stream().read() for each in ArchiveIterator(file) if each.rec_type == "response"]
    assert bodies == [HTML, HTML]


def test_opening_cuts_off_a_torn_record_and_finds_new_complete_ones(tmp_path: Path) -> None:
    path, old = tmp_path / "raw.warc.gz", "http://old.example/"
    ends = []
    with Archive(path) as archive:
        for name, requested in (("a", ""), ("b", old)):
            archive.append(page(name, requested))
            ends.append(path.stat().st_size)
        written = dict(archive.responses)
    assert written[old] == ends[0]
    whole = path.read_bytes()
    two = gzip.compress(record(URL, bytes(99_999)) * 2)[:-8]  # noise may read like this
    torn = (
        b"",
        whole[ends[0] : ends[1] - 9],
        b"\x1f",
        b"\x1f\x8b\x08 torn",
        bytes(5000),
        b"no gzip",
        two,
        two + bytes(8),
    )
    for tail in torn:
        path.write_bytes(whole + tail)
        with Archive(path) as archive:
            assert archive.responses == written
        assert path.read_bytes() == whole
    with Archive(path) as archive:
        for requested in (f"{URL}a", old):
            response = archive.read(requested, LIMIT)
            assert isinstance(response, FetchedPage) and response.requested == requested
    for first in (b"\x1f\x8b\x08 torn", bytes(4096), whole[:100] + bytes(3996), whole[:50] + bytes(462)):
        path.write_bytes(first)
        assert Archive(path).responses == {} and path.read_bytes() == b""
    path.write_bytes(whole[:-9])
    with Archive(path) as archive:
        archive.append(page("c"))
    assert [url for url, _ in read_pages(path, LIMIT)] == [f"{URL}a", f"{URL}c"]


def test_damage_in_the_middle_costs_its_record_and_none_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "raw.warc.gz"
    with Archive(path) as archive:
        for name in "abc":
            archive.append(page(name))
        _, begin, end = archive.responses.values()
    whole = path.read_bytes()
    for at in range(begin, end - 8, 5):
        for noise in (bytes(8), b"\xff" * 8, whole[:8]):
            path.write_bytes(damaged := whole[:at] + noise + whole[at + 8 :])
            with Archive(path) as archive:
                assert {f"{URL}a", f"{URL}c"} <= archive.responses.keys(), at
            assert path.read_bytes() == damaged


def test_files_of_another_kind_are_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "other.warc.gz"
    one_stream = gzip.compress(b"".join(record(f"{URL}{n}", http(HTML)) for n in range(3)), mtime=0)
    truncated = gzip.compress(bytes(range(256)) * 9_000, mtime=0)[:-9]
    short = gzip.compress(URL.encode(), mtime=0)
    theirs = write_warc(path, record(f"{URL}a", http(HTML)), record(f"{URL}b", http(HTML))).read_bytes()
    for content in (
        b"a text",
        b"\x89PNG\r\n\x1a\n\0",
        one_stream,
        truncated,
        short,
        short + bytes(9),
        theirs[:-1],
        theirs + bytes(9),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"other\.warc\.gz: "):
            Archive(path)
        assert path.read_bytes() == content
