import bz2
import gzip
from pathlib import Path

import pytest
import zstandard

from common.errors import InputError
from common.settings import SourceSettings
from corpus.sources.formats import recognised
from tests.warc_records import http, record

WARC = record("http://one.example/", http(b"<p>"))
JSON = b'{"text": "one"}\n'
PARQUET, ARROW, STREAM = b"PAR1\x15\4", b"ARROW1\0\0\xff\xff\xff\xff", b"\xff\xff\xff\xff\xa8\0\0\0\x10\0\0\0\0\0"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
ODD = {
    "crawl.parquet": (gzip.compress(WARC), r".gz-compressed WARC, not Parquet; set format: warc, or rename it"),
    "rows.jsonl": (PARQUET, "Parquet, not JSON lines; set format: parquet"),
    "rows.csv": (JSON, "JSON lines, not CSV; set format: jsonl"),
    "rows.parquet": (JSON, "JSON lines, not Parquet; set format: jsonl"),
    "rows.arrow": (PARQUET, "Parquet, not Arrow; set format: parquet"),
    "data.jsonl": (STREAM, "Arrow, not JSON lines; set format: arrow"),
    "page.warc.gz": (gzip.compress(b"<!DOCTYPE html><p>"), ".gz-compressed a page of HTML or XML, not WARC"),
    "wiki.json": (b'<doc id="1" url="u">\n', "WikiExtractor's output, not JSON lines; set format: wikiextractor"),
    "all.json": (b'[\n {"text": "one"}]', "one JSON array, not JSON lines; write one object per line"),
    "train.parquet": (LFS, "a pointer of Git LFS, not Parquet; get the file itself with git lfs pull"),
    "train.jsonl.zst": (LFS, "a pointer of Git LFS, not JSON lines"),
    "rows.jsonl.gz": (JSON, "JSON lines, not compressed; remove .gz from its name"),
    "rows.json": (zstandard.compress(JSON), ".zst-compressed JSON lines; end its name in .zst"),
    "x.parquet": (gzip.compress(PARQUET), ".gz-compressed Parquet; decompress it"),
    "x.warc.bz2": (bz2.compress(WARC), ".bz2-compressed WARC; decompress it"),
    "crawl": (WARC, "WARC; set format: warc, or end its name in .warc"),
    "list.gz": (gzip.compress(b"crawl-data/a.warc.gz\n"), ".gz-compressed a list of Common Crawl's paths; end"),
    "notes.md": (b"# Notes\n", "text; set format"),
    "book.pdf": (b"%PDF-1.7\n", "PDF; extract its text"),
    "photo": (b"\x89PNG\r\n\x1a\n\0", "an image; leave it out"),
    "texts.zip": (b"PK\3\4", "a zip archive; unpack it"),
    "texts.jsonl.tar": (bytes(257) + b"ustar", "a tar archive; unpack it"),
    "db": (b"SQLite format 3\0", "an SQLite database; export a table as CSV"),
    "page.html": (b"\n<html><p>", "a page of HTML or XML; extract its text"),
    "a.npy": (b"\x93NUMPY\1\0", "a NumPy array; "),
    "data.bin": (b"\1\2\0\3", "binary data; leave it out"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_file_that_is_not_what_it_seems_is_named_as_what_it_is(tmp_path: Path, name: str) -> None:
    content, message = ODD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        recognised(tmp_path / name, SourceSettings(path=""))
    assert str(caught.value).startswith(f"{tmp_path / name}: {message}") and "\n" not in str(caught.value)


def test_content_decides_before_the_name_and_any_text_may_be_a_text(tmp_path: Path) -> None:
    known = {
        "a": (JSON, "jsonl"), "b.gz": (gzip.compress(b"\xef\xbb\xbf \n" + JSON), "jsonl"), "c": (PARQUET, "parquet"),
        "d": (ARROW, "arrow"), "e.dat": (STREAM, "arrow"), "f": (b"", "jsonl"),
        "g": (b'<doc id="1" url="u" title="t">\n', "wikiextractor"), "wiki_00": (JSON, "wikiextractor"),
        "h.warc": (gzip.compress(WARC), "warc"), "i.warc.wet.zst": (zstandard.compress(WARC), "warc"),
        "j.txt": (JSON, "text"), "k.txt": (b"%PDF-1.7", "text"), "l.tsv.bz2": (bz2.compress(b"text\turl\n"), "csv"),
        "m.jsonl": (b"bad line\n" + JSON, "jsonl"), "n.json.xz": (b"", "jsonl"),
        "o.csv": ("text".encode("utf-16"), "csv"),
    }  # fmt: skip
    for name, (content, format) in known.items():
        (tmp_path / name).write_bytes(content)
        assert recognised(tmp_path / name, SourceSettings(path=""))[0] == format, name
    assert recognised(tmp_path / "k.txt", SourceSettings(path="", format="text"))[0] == "text"
    with pytest.raises(InputError, match="JSON lines, not WARC; set format: jsonl"):
        recognised(tmp_path / "a", SourceSettings(path="", format="warc"))
