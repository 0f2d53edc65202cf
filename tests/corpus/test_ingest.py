import bz2
import gzip
import lzma
import resource
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import zstandard

from common.errors import EmptyResultError, InputError
from common.files import Document, fingerprint, short_hash
from common.settings import SourceSettings
from corpus.ingest import format_of, ingest
from corpus.urls.url import document_id
from tests.conftest import Command
from tests.helpers import assert_one_line_error, prose, read_shard

WIKI = """<doc id="12" url="https://en.wikipedia.org/wiki?curid=12" title="The "Quoted" Title">
The "Quoted" Title

First paragraph &amp; more.

Second paragraph.
</doc>

<doc id="13" revid="99" url="https://en.wikipedia.org/wiki?curid=13" title="A &amp; B">
A & B
Text.
</doc>
"""


def take(folder: Path, *paths: Path, max_bad_share: float = 0.001, **options: str) -> list[Document]:
    sources = [SourceSettings(path=str(path), **options) for path in paths]
    ingest(sources, [folder / "out.jsonl.zst"], max_bad_share)
    return read_shard(folder / "out.jsonl.zst")


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstandard.compress)],
)
def test_loose_json_lines_keep_url_title_and_their_own_id(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    url = "HTTP://www.Example.org/a#b"
    lines = [{"content": "One.", "url": url, "id": 7, "title": "T", "score": 3}, {"content": "Two.", "url": "::"}]
    path = tmp_path / f"dump.json{suffix}"
    path.write_bytes(compress(b"\n\n".join(map(orjson.dumps, lines))))
    assert take(tmp_path, path, text_key="content") == [
        {"id": document_id("http://example.org/a"), "text": "One.", "source_id": "7", "url": url, "title": "T"},
        {"id": short_hash("Two."), "text": "Two.", "url": "::"},
    ]


def test_a_folder_of_text_files_is_a_document_a_file_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "1.txt").write_text("Third.\r\nLine.", newline="")
    (folder / "a.txt").write_bytes("\ufeffFirst é.".encode())
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"Second."))
    found = take(tmp_path, folder)
    assert [d["text"] for d in found] == ["First é.", "Third.\r\nLine.", "Second."]  # as paths sort
    assert all(d == {"id": short_hash(d["text"]), "text": d["text"]} for d in found)


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


def test_names_tell_formats_and_the_configuration_overrules_them(tmp_path: Path) -> None:
    assert format_of(Path("a/wiki_07.gz")) == "wikiextractor"
    assert format_of(Path("a.txt")) == format_of(Path("a.txt.zst")) == "text"
    assert format_of(Path("a.jsonl")) == format_of(Path("part-0001")) == "jsonl"
    (tmp_path / "lines.txt").write_text('{"text": "One."}\n{"text": "Two."}\n')
    assert len(take(tmp_path, tmp_path / "lines.txt", format="jsonl")) == 2


def test_bad_input_is_located_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json, wiki = tmp_path / "a.jsonl", tmp_path / "wiki_00"
    json.write_bytes(b'{"text": "ok"}\n{"text": 1}\nnot json\n[]\n{"text": "\\udc00"}\n{"text": "  "}\n')
    wiki.write_text("stray\n" + WIKI + '<doc id="1" url="u" title="t">\nnever closed\n<doc bad>\n</doc>\n')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    found = take(tmp_path, json, wiki, tmp_path / "latin.txt", max_bad_share=0.9)
    assert len(found) == 3
    warnings = capsys.readouterr().err
    for where in (
        "a.jsonl:2: no string under 'text'", "a.jsonl:3: not JSON", "a.jsonl:4: not a JSON object", "a.jsonl:5: not J",
        "wiki_00:1: text outside", "wiki_00:14: <doc> without </doc>", "wiki_00:16: not the first line",
        "wiki_00:17: text outside", "latin.txt: not UTF-8 at byte 3",
    ):  # fmt: skip
        assert where in warnings
    with pytest.raises(InputError, match=r"a.jsonl:2: .* are bad, more than max_bad_share 0.1"):
        take(tmp_path / "new", json, max_bad_share=0.1)
    assert not list(tmp_path.glob("new/*"))


def test_what_cannot_be_kept_as_it_is_is_a_bad_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corpus.ingest.LONGEST_LINE", 1_000_000)
    json, text = tmp_path / "a.jsonl", tmp_path / "long.txt"
    json.write_text(f'{{"text": "a", "unused": {2**64}}}\n{{"text": "b", "id": {2**64}}}\n')
    text.write_text("a line\n" * 200_000)
    assert [found["text"] for found in take(tmp_path, json, text, max_bad_share=0.9)] == ["a"]
    warnings = capsys.readouterr().err
    assert "a.jsonl:2: an integer beyond 64 bits" in warnings and "long.txt: longer than 1,000,000 bytes" in warnings


def test_nothing_to_take_is_an_error(tmp_path: Path, command: Command) -> None:
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(EmptyResultError, match=r"none of 1 documents is left \(1 empty\)"):
        take(tmp_path, tmp_path / "a.txt")
    with pytest.raises(InputError, match="none: no such file or folder"):
        take(tmp_path, tmp_path / "none")
    assert_one_line_error(command("corpus.ingest", "--output", tmp_path / "o.zst"), "--input", "sources")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 99)[:-9])
    result = command("corpus.ingest", "--input", tmp_path / "cut.jsonl.gz", "--output", tmp_path / "o.zst")
    assert_one_line_error(result, "cut.jsonl.gz", "truncated")


def test_the_shard_of_a_document_depends_on_its_id_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.files.shards._HELD", 2_000)  # many small frames
    lines = [orjson.dumps({"text": prose(n, 20), "n": n}) for n in range(300)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines[:100]))
    (tmp_path / "b.jsonl").write_bytes(b"\n".join(lines[100:]))
    (tmp_path / "all.jsonl").write_bytes(b"\n".join(lines))
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    shards: dict[str, list[list[Document]]] = {}
    for name, files in (("two", ["a.jsonl", "b.jsonl"]), ("one", ["all.jsonl"])):
        outputs = [tmp_path / name / f"{shard:04d}.jsonl.zst" for shard in range(200)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, limit))  # fewer than shards
        try:
            ingest([SourceSettings(path=str(tmp_path / file)) for file in files], outputs)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        shards[name] = [read_shard(path) for path in outputs]
    assert shards["one"] == shards["two"]
    for number, documents in enumerate(shards["one"]):
        assert all(int(document["id"], 16) % 200 == number for document in documents)
    order = {short_hash(prose(n, 20)): n for n in range(300)}
    assert all([order[d["id"]] for d in shard] == sorted(order[d["id"]] for d in shard) for shard in shards["one"])
    assert sum(map(len, shards["one"])) == 300


def test_the_command_reads_sources_from_the_configuration(tmp_path: Path, command: Command) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "One."}\n')
    (tmp_path / "c.yaml").write_text(f"run: x\nsources: [{{path: {tmp_path}/a.jsonl, text_key: body}}]\n")
    arguments = ("--config", tmp_path / "c.yaml", "--stats", tmp_path / "stats.json")
    result = command("corpus.ingest", *arguments, "--output-dir", tmp_path / "out", "--shards", 3)
    assert result.returncode == 0, result.stderr
    assert sorted(len(read_shard(path)) for path in (tmp_path / "out").iterdir()) == [0, 0, 1]
    read = orjson.loads((tmp_path / "stats.json").read_bytes())["inputs"]
    assert read == {str(tmp_path / "a.jsonl"): fingerprint(tmp_path / "a.jsonl")}
    assert_one_line_error(command("corpus.ingest", *arguments, "--shards", 3, "--output", "o"), "--output-dir")
    (tmp_path / "c.yaml").write_text("run: x\nsources: [{path: a, txt_key: body}]\n")
    assert_one_line_error(command("corpus.ingest", *arguments, "--output", "o"), "sources.0.txt_key", "text_key")
    (tmp_path / "c.yaml").write_text("run: x\n")
    assert_one_line_error(command("corpus.ingest", *arguments, "--output", "o"), "`urls`", "`sources`")


def test_the_worker_count_changes_no_byte(tmp_path: Path) -> None:
    lines = [orjson.dumps({"text": prose(n) if n % 20 else " ", "url": f"http://a.example/{n}"}) for n in range(150)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b"not json", *lines]))
    written = []
    for workers in (1, 2):
        outputs = [tmp_path / f"{workers}" / f"{shard}.jsonl.zst" for shard in range(3)]
        rejects = tmp_path / f"{workers}" / "rejects.jsonl.zst"
        stats = ingest([SourceSettings(path=str(tmp_path / "a.jsonl"))], outputs, 0.1, rejects, workers)
        assert (stats.extra["bad_lines"], stats.reasons) == (1, {"empty": 16})
        written.append([path.read_bytes() for path in (*outputs, rejects)])
    assert written[0] == written[1]
