"""WARC files, WET files and Common Crawl's lists of paths as sources of `corpus.ingest`."""

import gzip
from functools import partial
from pathlib import Path

import pytest

from common.errors import InputError
from common.settings import BlacklistSettings, ScrapeSettings, SourceSettings
from corpus.ingest import ingest
from corpus.scrape.offline import extract_archives
from corpus.scrape.warc import read_records
from corpus.urls.url import document_id
from tests.corpus.scrape.shards import article
from tests.corpus.test_ingest import take
from tests.helpers import prose, read_rejects, read_shard
from tests.warc_records import http, record, write_warc

WET = [
    record("", b"software: x", kind="warcinfo"),
    *(
        record(
            f"http://{n}.example/", f"Größe {n}\n{prose(n)}".encode(), kind="conversion",
            WARC_Date="2026-01-02T03:04:05Z", WARC_Identified_Content_Language="deu,eng",
        )
        for n in range(3)
    ),
    record("http://bad.example/", b"caf\xe9", kind="conversion"),
]  # fmt: skip


def url_at(path: Path, byte: int) -> str:
    with path.open("rb") as file:
        file.seek(byte)
        return str(next(read_records(file, path, lambda found: found.rec_headers.get_header("WARC-Target-URI")))[2])


@pytest.mark.parametrize("name", ["a.warc.wet.gz", "a.warc.wet", "a.wet.zst"])
def test_wet_files_give_their_texts_with_date_and_languages(tmp_path: Path, name: str) -> None:
    found = take(tmp_path, write_warc(tmp_path / name, *WET), name="cc")
    places = [document.pop("origin").rpartition(":") for document in found]
    assert [path for path, *_ in places] == [str(tmp_path / name)] * 3
    assert [url_at(tmp_path / name, int(byte)) for *_, byte in places] == [document["url"] for document in found]
    meta = {"source": "cc", "date": "2026-01-02T03:04:05Z", "language": "deu,eng"}
    assert found == [
        {"id": document_id(url), "text": f"Größe {n}\n{prose(n)}", "url": url, "meta": meta}
        for n in range(3)
        for url in [f"http://{n}.example/"]
    ]


def test_pages_of_warc_files_become_what_scrape_makes_of_them(tmp_path: Path) -> None:
    pages = [http(article(n)) for n in range(4)] + [http(b"<p>"), http(b"", status="404 Gone"), http(article(0))]
    urls = [f"https://one.example/{n % 6}" for n in range(7)]
    dated = partial(record, WARC_Date="2026-01-02T03:04:05Z")
    path = write_warc(tmp_path / "a.warc.gz", *map(dated, urls, pages), record("http://10.0.0.1/", http(article(9))))
    extract_archives([path], tmp_path / "scraped.jsonl", ScrapeSettings(), BlacklistSettings())
    (tmp_path / "b.txt").write_text("Beside it.")
    sources = [SourceSettings(path=str(path)), SourceSettings(path=str(tmp_path / "b.txt"))]
    for workers in (1, 2):
        output, rejects = tmp_path / f"{workers}.jsonl.zst", tmp_path / f"{workers}.rejects.jsonl"
        stats = ingest(sources, [output], workers=workers, rejects=rejects)
        assert read_shard(output)[:-1] == read_shard(tmp_path / "scraped.jsonl")
        reasons = [(found["url"], found["reason"]) for found in read_rejects(rejects)]
        ends = [
            (urls[4], "extract_empty"),
            (urls[5], "http_404"),
            (urls[6], "duplicate"),
            ("http://10.0.0.1/", "private_host"),
        ]
        assert reasons == ends and (stats.documents_in, stats.documents_out) == (9, 5)
        assert stats.extra["fetch_dates"] == {"first": "2026-01-02", "last": "2026-01-02", "pages": 4}
    assert (tmp_path / "1.jsonl.zst").read_bytes() == (tmp_path / "2.jsonl.zst").read_bytes()


def test_a_list_of_paths_stands_for_its_files_which_must_be_there(tmp_path: Path) -> None:
    names = [f"crawl-data/CC-MAIN-2026-01/segments/{n}/wet/{n}.warc.wet.gz" for n in range(3)]
    for name, place in zip(names, (names[0], "1.warc.wet.gz", names[2]), strict=True):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        write_warc(tmp_path / place, record(f"http://{name[-13]}.example/", name.encode(), kind="conversion"))
    listed = tmp_path / "wet.paths.gz"
    listed.write_bytes(gzip.compress("\n".join([names[2], *names[:2], ""]).encode()))
    found = take(tmp_path, listed)
    assert [one["text"] for one in found] == [names[2], *names[:2]]
    (tmp_path / names[2]).unlink()
    with pytest.raises(InputError, match=rf"wet\.paths\.gz: 1 of its 3 files are missing below .*, such as {names[2]}"):
        take(tmp_path, listed)
