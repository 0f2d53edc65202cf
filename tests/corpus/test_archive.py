import gzip
from pathlib import Path

import pytest
from warcio.archiveiterator import ArchiveIterator

from common.errors import InputError
from corpus.archive import Archive
from corpus.fetch import Page

HTML = b"<p>Hello</p>"


def page(name: str) -> Page:
    headers = (("Content-Type", "text/html"), ("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked"))
    return Page(f"https://one.example/{name}", 200, "OK", headers, "text/html", gzip.compress(HTML), HTML)


def responses(path: Path) -> dict[str, bytes]:
    with path.open("rb") as file:
        return {
            record.rec_headers.get_header("WARC-Target-URI"): record.content_stream().read()
            for record in ArchiveIterator(file)
            if record.rec_type == "response"
        }


def test_responses_are_read_back_by_their_logical_urls(tmp_path: Path) -> None:
    path = tmp_path / "raw.warc.gz"
    with Archive(path, 0) as archive:
        archive.append(page("a"))
        assert archive.append(page("b")) == path.stat().st_size
    assert responses(path) == {"https://one.example/a": HTML, "https://one.example/b": HTML}
    with path.open("rb") as file:
        record = list(ArchiveIterator(file, no_record_parse=False))[1]
        assert record.http_headers.get_statuscode() == "200"
        assert record.http_headers.get_header("Transfer-Encoding") is None


def test_a_torn_record_is_cut_off_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "raw.warc.gz"
    with Archive(path, 0) as archive:
        end = archive.append(page("a"))
        archive.append(page("lost"))
    path.write_bytes(path.read_bytes()[:-9])
    with Archive(path, end) as archive:
        archive.append(page("b"))
    assert list(responses(path)) == ["https://one.example/a", "https://one.example/b"]


def test_an_archive_that_lost_records_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "raw.warc.gz"
    path.write_bytes(b"short")
    with pytest.raises(InputError, match="shorter than the journal"):
        Archive(path, 1000)
    assert path.read_bytes() == b"short"
