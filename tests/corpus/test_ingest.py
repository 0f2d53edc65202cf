import bz2
import gzip
import random
import resource
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from common.errors import EmptyResultError, InputError
from common.files import Document, read_lines, short_hash, write_json
from common.settings import (
    BlacklistSettings,
    CleanSettings,
    DecontaminateSettings,
    DedupSettings,
    ScrapeSettings,
    SourceSettings,
)
from corpus.clean import clean
from corpus.decontaminate import count, cut
from corpus.dedup.__main__ import dedup
from corpus.ingest import ingest
from corpus.scrape.offline import extract_archives
from corpus.scrape.warc import read_records
from corpus.urls.url import document_id
from tests.corpus.scrape.shards import article
from tests.helpers import prose, read_rejects, read_shard
from tests.warc_records import http, record, write_warc

WIKI = """<doc id="12" url="https://en.wikipedia.org/wiki?curid=12" title="The "Quoted" Title">
The "Quoted" Title

First paragraph &amp; more.

Second paragraph.
</doc>

<doc id="13" revid="99" url="https://en.wikipedia.org/wiki?curid=13" title="A &amp; B">
A &amp; B
Text.
</doc>
"""


def take(folder: Path, *paths: Path, max_bad_share: float = 0.001, **options: Any) -> list[Document]:
    sources = [SourceSettings(path=str(path), **options) for path in paths]
    ingest(sources, [folder / "out.jsonl.zst"], max_bad_share=max_bad_share)
    return read_shard(folder / "out.jsonl.zst")


def test_loose_json_lines_keep_url_title_and_their_own_id(tmp_path: Path) -> None:
    url = "HTTP://www.Example.org/a#b"
    lines = [{"content": "One.", "url": url, "id": 7, "title": "T", "meta": {}}, {"content": "Two.", "url": "::"}]
    (tmp_path / "dump.json.gz").write_bytes(gzip.compress(b"\n\n".join(map(orjson.dumps, lines))))
    assert take(tmp_path, tmp_path / "dump.json.gz", text_key="content") == [
        {
            "id": document_id("http://example.org/a"),
            "text": "One.",
            "origin": f"{tmp_path / 'dump.json.gz'}:1",
            "source_id": "7",
            "url": url,
            "title": "T",
        },
        {"id": short_hash("Two."), "text": "Two.", "origin": f"{tmp_path / 'dump.json.gz'}:3", "url": "::"},
    ]


def test_all_other_keys_go_under_meta_as_they_are_and_a_source_may_be_named(tmp_path: Path) -> None:
    further = {"date": "2026-01-02", "language": None, "tags": [1.5, {"a": []}]}
    lines = [
        {"text": "One.", **further, "meta": {"date": "old", "source": "books"}},
        {"text": "Two.", "meta": "text", "html": "x" * 70_000},
        {"text": "Three.", "html": "<p>"},
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    (tmp_path / "b.txt").write_text("Four.")
    web = SourceSettings(path=str(tmp_path / "a.jsonl"), skip_keys=["html", "text"], name="web")
    stats = ingest([web, SourceSettings(path=str(tmp_path / "b.txt"))], [tmp_path / "out.jsonl.zst"])
    assert [found.get("meta") for found in read_shard(tmp_path / "out.jsonl.zst")] == [
        {"source": "books", **further},
        {"source": "web", "meta": "text"},
        {"source": "web"},
        None,
    ]
    named = {"web": {"documents": 2, "bytes": 10}, "books": {"documents": 1, "bytes": 4}}
    assert stats.as_dict()["kept_by"] == {"source": named}
    with pytest.raises(InputError, match=r"a\.jsonl:2: 70,\d+ bytes .* 'html' under skip_keys; 1 of 3"):
        take(tmp_path / "new", tmp_path / "a.jsonl")


def test_metadata_travels_through_clean_dedup_and_decontaminate(tmp_path: Path) -> None:
    texts = {"short": prose(1), "long": prose(1) + " More.", "other": prose(2) + "\u201d"}
    lines = [{"text": text, "license": name, "language": name} for name, text in texts.items()]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    (tmp_path / "set.txt").write_text("a question of no fewer than eight words in all")
    take(tmp_path, tmp_path / "a.jsonl", name="web")
    cleaned, rules = tmp_path / "clean.jsonl.zst", DecontaminateSettings(files=[str(tmp_path / "set.txt")])
    clean([tmp_path / "out.jsonl.zst"], cleaned, CleanSettings())
    deduplicated = dedup([cleaned], tmp_path / "dedup", DedupSettings(), workers=2)
    survivors = tmp_path / "dedup" / cleaned.name
    write_json(tmp_path / "counts.json", count([survivors], rules))
    cut([survivors], [tmp_path / "counts.json"], tmp_path / "end.zst", rules)
    detected = {"detected_language": "en", "detected_score": 0.99}
    metas = [{"source": "web", "license": name, "language": name, **detected} for name in ("long", "other")]
    assert [document["meta"] for document in read_shard(tmp_path / "end.zst")] == metas
    assert list(deduplicated.as_dict()["kept_by"]["language"]) == ["long", "other"]


def test_a_folder_of_text_files_is_a_document_a_file_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "1.txt").write_text("Third.\r\nLine.", newline="")
    (folder / "a.txt").write_bytes("\ufeffFirst é.".encode())
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"Second."))
    found = take(tmp_path, folder)
    assert [d["text"] for d in found] == ["First é.", "Third.\r\nLine.", "Second."]  # as paths sort
    assert [d["id"] for d in found] == [short_hash(d["text"]) for d in found]
    assert [d["origin"] for d in found] == [f"{folder / name}:1" for name in ("a.txt", "b/1.txt", "b.txt.gz")]


def test_both_forms_of_wikiextractor_are_read_and_titles_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "AA").mkdir()
    (tmp_path / "AA" / "wiki_00").write_text(WIKI)
    record = {"id": "14", "revid": "1", "url": "https://en.wikipedia.org/wiki?curid=14", "title": "C", "text": "See."}
    (tmp_path / "AA" / "wiki_01.bz2").write_bytes(bz2.compress(orjson.dumps(record) + b"\n"))
    found = take(tmp_path, tmp_path / "AA")
    assert [(d["source_id"], d["title"], d["text"]) for d in found] == [
        ("12", 'The "Quoted" Title', "First paragraph &amp; more.\n\nSecond paragraph."),
        ("13", "A & B", "Text."),
        ("14", "C", "See."),
    ]
    assert [d["id"] for d in found] == [document_id(f"https://en.wikipedia.org/wiki?curid={n}") for n in (12, 13, 14)]


def test_bad_input_is_located_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json, wiki, texts = tmp_path / "a.jsonl", tmp_path / "wiki_00", tmp_path / "texts"
    json.write_bytes(
        b'{"text": "ok"}\n{"text": 1}\nnot json\n[]\n{"text": "\\udc00"}\n{"text": "b", "id": 18446744073709551616}\n'
        b'{"text": "a", "unused": 18446744073709551616}\n{"text": "  "}\n'
    )
    wiki.write_text("stray\n" + WIKI + '<doc id="1" url="u" title="t">\nnever closed\n<doc bad>\n</doc>\n')
    texts.mkdir()
    (texts / "latin.txt").write_bytes(b"caf\xe9")
    (texts / "random.txt").write_bytes(random.Random(1).randbytes(500))
    (texts / "zip.txt").write_bytes(b"PK\x03\x04" + b"text" * 99)
    for number in range(38):
        (texts / f"{number}.txt").write_text(f"Text {number}, with a \0 in it.")
    found = take(tmp_path, json, wiki, max_bad_share=0.9, skip_keys=["unused"])
    assert [document["text"] for document in found][::3] == ["ok", "Text."]
    warnings = capsys.readouterr().err
    lines = [f"a.jsonl:{n}:" for n in range(2, 7)] + [f"wiki_00:{n}:" for n in (1, 14, 16, 17)]
    assert "a.jsonl:7" not in warnings, "a number under a skipped key does no harm"
    assert all(where in warnings for where in lines)
    with pytest.raises(InputError, match=r"a.jsonl:2: .*6 of 8"):
        take(tmp_path / "new", json, max_bad_share=0.6)
    json.write_text('{"text": "\\r\\n %PDF-1.4 and so on"}\n{"text": "PDF and so on"}\n')
    assert [document["text"] for document in take(tmp_path, json)] == ["PDF and so on"]
    with pytest.raises(InputError, match=r"latin.txt: not UTF-8 at byte 3; .*3 of 41 files .*`encoding`") as error:
        take(tmp_path / "new", texts)
    assert "random.txt: binary data; " in str(error.value) and "zip.txt: a zip archive; " in str(error.value)
    sources, rejects = [SourceSettings(path=str(texts))], tmp_path / "rejects.jsonl"
    stats = ingest(sources, [tmp_path / "out.jsonl"], max_bad_share=0.1, rejects=rejects)
    assert (stats.documents_in, stats.documents_out, stats.reasons) == (41, 38, {"encoding": 1, "binary": 2})
    assert [orjson.loads(line)["origin"] for line in read_lines(rejects)] == [
        str(texts / name) for name in ("latin.txt", "random.txt", "zip.txt")
    ]
    with pytest.raises(InputError, match=r"random.txt: binary data; 1 of 2 files"):
        take(tmp_path / "new", texts / "random.txt", texts / "latin.txt", encoding="latin-1")
    (texts / "latin.txt").write_text(" \n")
    with pytest.raises(EmptyResultError):
        take(tmp_path / "new", texts / "latin.txt")
    assert not list(tmp_path.glob("new/*"))


def test_the_shard_of_a_document_depends_on_its_id_alone_and_workers_change_no_byte(tmp_path: Path) -> None:
    lines = [orjson.dumps({"text": prose(n, 20) if n % 20 else " ", "n": n}) for n in range(300)]
    lines.insert(100, b"not json")
    for name, part in (("all", lines), ("a", lines[:101]), ("b", lines[101:])):
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(part))
    limits, shards, found = resource.getrlimit(resource.RLIMIT_NOFILE), [f"{n:04d}.jsonl.zst" for n in range(200)], []
    for folder, workers, files in (("one", 1, ["all"]), ("workers", 3, ["all"]), ("files", 1, ["a", "b"])):
        sources = [SourceSettings(path=str(tmp_path / f"{file}.jsonl")) for file in files]
        outputs = [tmp_path / folder / name for name in shards]
        resource.setrlimit(resource.RLIMIT_NOFILE, (150, limits[1]))  # fewer than shards
        try:
            rejects = tmp_path / folder / "rejects.zst"
            stats = ingest(sources, outputs, max_bad_share=0.1, rejects=rejects, workers=workers)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (stats.documents_out, stats.extra["bad_lines"], stats.reasons) == (285, 1, {"empty": 15})
        found.append([[{**d, "origin": ""} for d in read_shard(path)] for path in outputs])
    for name in (*shards, "rejects.zst"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "workers" / name).read_bytes()
    assert found[0] == found[1] == found[2]  # one file or two: they differ in `origin` alone
    order = {short_hash(prose(n, 20)): n for n in range(300)}
    for number, documents in enumerate(found[0]):
        names = [document["id"] for document in documents]
        assert all(int(name, 16) % 200 == number for name in names) and names == sorted(names, key=order.__getitem__)


# --- WARC files, WET files and Common Crawl's lists of paths

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
