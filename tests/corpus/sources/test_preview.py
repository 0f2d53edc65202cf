"""What is said of sources before a run; above all, that ingest then says the same."""

import gzip
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import InputError, ToolkitError
from common.settings import SourceSettings
from corpus.ingest import ingest
from corpus.sources import preview as module
from corpus.sources.preview import preview

GOOD, OTHER = b'{"text": "one"}\n', b'{"txet": "two", "id": 1}\n'
LATIN = "Müller\n".encode("cp1252")
REFUSED: dict[str, tuple[dict[str, bytes], str]] = {
    "a file without a reader": ({"a.txt": b"one", "notes.md": b"# Notes\n"}, "notes.md: text; set format"),
    "another name than its content": ({"a.jsonl": GOOD, "b.jsonl": b"PAR1\x15\4"}, "b.jsonl: Parquet, not JSON lines"),
    "a key": ({"a.jsonl": OTHER}, "a.jsonl:1: no string under 'text', but txet, id; set text_key (did you mean 'txet"),
    "a key of a large file": ({"a.jsonl": OTHER * 12 + GOOD * 70_000}, "a.jsonl:10: no string under 'text', but txet"),
    "no text": ({"a.jsonl": b'{"text": ["a"]}\n'}, "a.jsonl:1: no string under 'text'; 1 of 1 lines"),
    "a later key": ({"a.jsonl.gz": gzip.compress(GOOD * 9 + OTHER)}, "a.jsonl.gz:10: no string under 'text', but txet"),
    "a column": ({"a.csv": b"txet,id\nx,1\n"}, "a.csv: no column 'text', but txet, id; set text_key (did you mean"),
    "CSV in cp1252": ({"a.csv": b"text\n" + LATIN}, "a.csv: not UTF-8 (invalid"),
    "texts in cp1252": ({"a.txt": LATIN, "b.txt": b"one"}, "a.txt: not UTF-8 at byte 1; 1 of 2 files are bad"),
    "JSON lines in cp1252": ({"a.jsonl": b'{"text": "' + LATIN[:-1] + b'"}\n'}, "a.jsonl:1: not UTF-8 at byte 12"),
    "a damaged file": ({"a.jsonl.gz": gzip.compress(GOOD)[:-4]}, "a.jsonl.gz: truncated .gz file"),
}  # fmt: skip


def said(action: Callable[..., object], *arguments: object, **named: object) -> str:
    """The error of a call, or the empty string."""
    try:
        action(*arguments, **named)
    except ToolkitError as error:
        return str(error)
    return ""


def write(folder: Path, files: dict[str, bytes]) -> list[SourceSettings]:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [SourceSettings(path=str(folder))]


def ingested(sources: list[SourceSettings], folder: Path, max_bad_share: float) -> str:
    return said(ingest, sources, [folder / "out.jsonl"], max_bad_share=max_bad_share, allow_empty=True)


@pytest.mark.parametrize("what", REFUSED)
def test_what_ingest_refuses_is_refused_before_it_in_the_same_words(tmp_path: Path, what: str) -> None:
    files, message = REFUSED[what]
    sources = write(tmp_path / "in", files)
    error = said(preview, sources, 0.001)
    assert message in error and error.startswith(f"{tmp_path}/in/") and "\n" not in error
    assert error == ingested(sources, tmp_path, 0.001)


def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any sources are too large to be read whole."""
    monkeypatch.setattr(module, "_SMALL", 0)
    monkeypatch.setattr(module, "_HEADS", 6)
    monkeypatch.setattr(module, "_READ", 4)


def test_nothing_is_refused_that_ingest_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And most of the rest is, in files that are not read whole, too."""
    large(monkeypatch)
    draw = random.Random(1)
    kinds: list[tuple[str, bytes, bytes]] = [
        ("{}.jsonl", GOOD, OTHER),
        ("{}.jsonl", GOOD, b'{"text": "' + LATIN[:-1] + b'"}\n'),
        ("{}.txt", b"one\n", LATIN),
        ("{}.csv", b"text,id\none,1\n", b"one,1,2\n"),
        ("{}", b'<doc id="1" url="u" title="t">\nx\n</doc>\n', b"outside\n"),
    ]
    seen = {(False, False): 0, (False, True): 0, (True, True): 0}
    for number in range(100):
        files = {}
        for name, good, bad in draw.choices(kinds, k=2):
            for _ in range(draw.choice([1, 2, 12])):
                blocks = [bad * draw.choice([0, 0, 0, 1, 9, 10, 12]), good * draw.choice([0, 1, 90])]
                blocks = blocks if draw.random() < 0.5 and name.endswith("jsonl") else blocks[::-1]
                files[name.format(f"f{len(files)}")] = b"".join(blocks) or good
        sources, share = write(tmp_path / str(number), files), draw.choice([0.001, 0.1, 0.3, 0.5])
        before, then = said(preview, sources, share), ingested(sources, tmp_path, share)
        assert then or not before, (files, share, before)
        seen[bool(before), bool(then)] += 1
    assert min(seen.values()) >= 5, seen


def test_what_may_fail_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    large(monkeypatch)
    files = {"a.jsonl": OTHER + GOOD * 2000, "b.txt": LATIN, **{f"c{number}.txt": b"one" for number in range(20)}}
    sources = write(tmp_path / "in", files)
    (tmp_path / "in/link.txt").symlink_to("nowhere")
    preview(sources, 0.1)
    notes = capsys.readouterr().err.splitlines()
    assert notes[0] == f"note: {tmp_path}/in/link.txt: a broken link, left out"
    assert notes[1].startswith(f"note: {tmp_path}/in/a.jsonl:1: no string under 'text', but txet, id; set text_key")
    assert "1 of 11 lines that were tried are bad; max_bad_share limits" in notes[1]
    assert not ingested(sources, tmp_path, 0.1)


def test_a_file_that_cannot_be_read_is_one_line_with_its_cure(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("/proc/self/mem")  # reading it fails, for root too
    assert said(preview, [SourceSettings(path=str(tmp_path))], 0.001) == (
        f"{tmp_path}/a.jsonl: cannot be read (Input/output error); make it readable, or leave it out with glob"
    )
    (tmp_path / "data.parquet").symlink_to("nowhere")  # a dataset folder: its tables are read, broken or not
    with pytest.raises(InputError, match=r"data\.parquet: a broken link; restore"):
        preview([SourceSettings(path=str(tmp_path))], 0.001)


def test_pipes_sources_without_files_and_files_of_an_earlier_run_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    sources = write(tmp_path / "in", {"notes.md": b"# Notes\n", "a.txt": LATIN})
    others = [SourceSettings(path=str(tmp_path / "pipe.jsonl")), SourceSettings(path="s3://bucket/a.jsonl")]
    preview(others, 0.001)
    known = {str(tmp_path / "in/notes.md")}
    preview(sources + others, 0.001, known)  # the others may have many files of text
    with pytest.raises(InputError, match="1 of 1 files are bad"):
        preview(sources, 0.001, known)
    with pytest.raises(InputError, match=r"notes\.md: text"):
        preview(sources + others, 0.001)


def test_tables_need_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    sources = write(tmp_path / "in", {"a.parquet": b""})
    with pytest.raises(InputError, match=r"a\.parquet: needs pyarrow to be read; pip install"):
        preview(sources, 0.001)


def test_a_stray_file_among_thousands_is_seen_though_few_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(module, "_HEADS", 50)
    monkeypatch.setattr(module, "recognised", lambda path, source: opened.append(path) or ("text", source))
    sources = write(tmp_path / "in", {f"{number:04d}.txt": b"one" for number in range(400)} | {"0100.md": b"# One"})
    preview(sources, 0.001)
    names = [path.name for path in opened]
    assert "0100.md" in names and 20 <= len(names) <= 50
    assert names[1:] == [f"{number:04d}.txt" for number in range(0, 400, 16)], "evenly spread"
