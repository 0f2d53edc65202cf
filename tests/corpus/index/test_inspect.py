from pathlib import Path

from corpus.index import IndexedDataset
from corpus.index.__main__ import inspect
from tests.conftest import Command
from tests.corpus.index.helpers import by_hand, files, written
from tests.helpers import assert_one_line_error


def test_inspect_says_what_is_inside(tmp_path: Path) -> None:
    text = inspect(written(tmp_path / "a", [[1] * 9 + [50256], [2] * 1000, [], [50256]]))
    for line in (
        "documents    4",
        "tokens       1,011",
        "bytes        2,022 in .bin, 122 in .idx",
        "longest      1,000 tokens",
        "vocabulary   50,257, end of text 50256",
        "end of text  closes 2 of 3 documents checked",
        "checksums    yes",
    ):
        assert line in text.splitlines(), text
    assert [line.split() for line in text.splitlines()[-4:]] == [
        ["0", "to", "0", "tokens", "1", "25.0", "%"],
        ["1", "to", "1", "tokens", "1", "25.0", "%"],
        ["8", "to", "15", "tokens", "1", "25.0", "%"],
        ["512", "to", "1,023", "tokens", "1", "25.0", "%"],
    ]


def test_inspect_says_what_it_cannot_know(tmp_path: Path) -> None:
    text = inspect(written(tmp_path / "a", [], meta=None))
    assert "documents    0" in text and "unknown (no .json)" in text and "checksums    none" in text


def test_a_document_of_several_sequences_is_closed_by_the_last_of_them(tmp_path: Path) -> None:
    by_hand(tmp_path / "a", [[[7], [1]], [[2], [7]], [[3, 7], []]], modes=[0, 1, 0, 1, 0, 1])
    (tmp_path / "a.json").write_text('{"vocab_size": 8, "end_of_text": 7}')
    text = inspect(IndexedDataset(tmp_path / "a"))
    assert "sequences    6, with modes" in text and "closes 2 of 3 documents checked" in text
    assert "checksums    none" in text


def test_the_command_reads_every_token_where_asked(tmp_path: Path, command: Command) -> None:
    written(tmp_path / "a", [[1] * 10, [2] * 1000])
    result = command("corpus.index", "inspect", tmp_path / "a", "--verify")
    assert result.returncode == 0 and result.stdout.endswith("verified\n")
    (tmp_path / "a.bin").write_bytes(bytes(4) + files(tmp_path / "a")[".bin"][4:])
    assert command("corpus.index", "inspect", tmp_path / "a").returncode == 0
    assert_one_line_error(command("corpus.index", "inspect", tmp_path / "a", "--verify"), "a.bin", "checksum")
    assert_one_line_error(command("corpus.index", "inspect", tmp_path / "a.idx"), "give the PREFIX without its suffix")
    assert_one_line_error(command("corpus.index", "inspect", tmp_path / "none"), "none.idx", "no such file")
