import gzip
from pathlib import Path

import pytest
from warcio.archiveiterator import ArchiveIterator

from common.errors import InputError
from corpus.scrape.archive import Archive
from corpus.scrape.response import FetchedPage
from corpus.scrape.warc import read_pages
from tests.warc_records import http, record

HTML = b"<p>Hello</p>"
LIMIT = 100_000
URL = "https://one.example/a"


def page(name: str, requested: str = "") -> FetchedPage:
    headers = (("Content-Type", "text/html"), ("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked"))
    url = f"https://one.example/{name}"
    return FetchedPage(url, 200, "OK", headers, "text/html", gzip.compress(HTML, mtime=0), HTML, requested or url)


def names(path: Path) -> list[str]:
    """The URL of each page, or the reason of a response without a page."""
    return [found if isinstance(found, str) else url for url, found in read_pages(path, LIMIT)]


def test_responses_are_read_back_unchanged_also_by_other_readers(tmp_path: Path) -> None:
    path = tmp_path / "raw.warc.gz"
    pages = [page("a"), page("b", requested="http://old.example/ä#top")]
    with Archive(path, 0) as archive:
        _, first = archive.append(pages[0])
        assert archive.append(pages[1]) == (first, path.stat().st_size)
    without_chunks = [("Content-Type", "text/html"), ("Content-Encoding", "gzip")]
    for expected, (url, found) in zip(pages, read_pages(path, LIMIT), strict=True):
        assert url == expected.requested
        assert isinstance(found, FetchedPage) and list(found.headers) == without_chunks
        assert (found.url, found.requested, found.body) == (expected.url, expected.requested, HTML)
        assert (found.status, found.reason, found.raw) == (200, "OK", expected.raw)
    with path.open("rb") as file:
        bodies = [each.content_stream().read() for each in ArchiveIterator(file) if each.rec_type == "response"]
    assert bodies == [HTML, HTML]


def test_opening_cuts_off_a_torn_record_and_finds_new_complete_ones(tmp_path: Path) -> None:
    path = tmp_path / "raw.warc.gz"
    with Archive(path, 0) as archive:
        end = archive.append(page("a"))
        later = archive.append(page("b", requested="http://old.example/"))
    whole = path.read_bytes()
    with Archive(path, later[1]) as archive:
        assert archive.new_responses == [] and archive.read(later[0], LIMIT)[0] == "http://old.example/"  # type: ignore[index]
    for tail in (b"", whole[end[0] : end[1] - 9], b"\x1f", b"\x1f\x8b\x08 torn", bytes(5000), b"no gzip"):
        for known in (0, end[1]):
            path.write_bytes(whole + tail)
            with Archive(path, known) as archive:
                expected = [("https://one.example/a", *end, True), ("http://old.example/", *later, True)]
                assert archive.new_responses == expected[1 if known else 0 :]
            assert path.read_bytes() == whole
    path.write_bytes(whole[:-9])
    with Archive(path, end[1]) as archive:
        archive.append(page("c"))
    assert names(path) == ["https://one.example/a", "https://one.example/c"]
    for cut in (1, 40, 200):  # of the first record
        path.write_bytes(whole[:cut])
        with Archive(path, 0) as archive:
            archive.append(page("d"))
        assert names(path) == ["https://one.example/d"]


def test_a_damaged_record_is_distinguished_from_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "raw.warc.gz"
    with Archive(path, 0, obey_robots=False) as archive:
        places = [archive.append(page(name)) for name in "abc"]
    content = bytearray(path.read_bytes())
    content[places[1][0] + 60] ^= 0xFF
    path.write_bytes(content)
    with Archive(path, 0) as archive:
        assert [(found.url[-1], found.obeyed_robots) for found in archive.new_responses] == [("a", False), ("c", False)]
        assert archive.read(places[1][0], LIMIT) is None and archive.read(places[2][0], 1)[1] == "too_large"  # type: ignore[index]
    assert path.read_bytes() == content


def test_files_of_another_kind_are_never_appended_to(tmp_path: Path) -> None:
    one_stream = gzip.compress(b"".join(record(f"{URL}{n}", http(HTML)) for n in range(3)), mtime=0)
    for content in (b"a text", gzip.compress(b"a text" * 1000, mtime=0), record(URL, http(HTML)), one_stream):
        path = tmp_path / "other.warc.gz"
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"other\.warc\.gz: "):
            Archive(path, 0)
        assert path.read_bytes() == content


def test_an_archive_shorter_than_the_journal_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "raw.warc.gz"
    path.write_bytes(b"short")
    with pytest.raises(InputError, match="shorter than the journal"):
        Archive(path, 1000)
    assert path.read_bytes() == b"short"
