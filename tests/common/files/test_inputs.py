import os
from pathlib import Path

import pytest

from common.errors import InputError
from common.files import document_writer, expand_inputs, fingerprint, first_change
from tests.helpers import assert_one_line_error, called, document, write_shard


def below(folder: Path, paths: list[Path]) -> list[str]:
    return [str(path.relative_to(folder)) for path in paths]


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step's folder: shards, and all the other files that a run leaves there."""
    for name in ("0001.jsonl.zst", "more/0002.jsonl", "0000.jsonl.zst"):
        write_shard(tmp_path / name, [document(1, "text")])
    for name, count in (("rejects/0000", 2), ("removed/0001", 1), ("rejects/0002", 0), ("elsewhere", 1)):
        with document_writer(tmp_path / f"{name}.jsonl.zst", "clean") as reject:
            for number in range(count):
                reject({**document(number, "x" * 100_000), "reason": "short"})
    for name in ("0000.stats.json", "stats.json", "0000.counts.json", "clusters.json", "0000.jsonl.zst.tmp"):
        (tmp_path / name).write_text("{}")
    for name in ("0003.jsonl.zst.journal", "0000.warc.gz", ".hidden.jsonl", ".git/x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    os.mkfifo(tmp_path / "pipe.jsonl")
    return tmp_path


def test_a_folder_stands_for_its_shards_and_says_what_it_leaves_out(
    step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert below(step, expand_inputs([str(step)], "shards")) == ["0000.jsonl.zst", "0001.jsonl.zst", "more/0002.jsonl"]
    (note,) = capsys.readouterr().err.splitlines()
    assert "12 left out: " in note and "0000.counts.json" in note
    shards = ["0000.jsonl.zst", "0001.jsonl.zst"]
    assert below(step, expand_inputs([f"{step}/*.jsonl.zst"], "shards")) == shards
    assert below(step, expand_inputs([f"{step}/**/*.zst"], "lists")) == shards
    lists = ["0000.jsonl.zst", "0000.warc.gz", "0001.jsonl.zst", "more/0002.jsonl"]
    assert below(step, expand_inputs([str(step)], "lists")) == lists


@pytest.mark.parametrize(
    "name",
    [
        *("rejects/0000.jsonl.zst", "rejects/0002.jsonl.zst", "removed/0001.jsonl.zst", "elsewhere.jsonl.zst"),
        *("0000.stats.json", "0000.jsonl.zst.tmp", "0003.jsonl.zst.journal", "rejects"),
        *("clusters.json", "missing.txt", "*.nothing"),
    ],
)
def test_what_is_no_shard_is_refused_even_where_it_is_named(step: Path, name: str) -> None:
    result = called("corpus.clean", "--input", step / name, "--output", step / "out.zst")
    assert_one_line_error(result, str(step / name))
    if "rejects" in name or name[0] in "rem":
        with pytest.raises(InputError):
            expand_inputs([f"{step}/{name}"], "lists")


def test_links_to_folders_are_followed_each_folder_once_and_never_in_circles(tmp_path: Path) -> None:
    for name in ("in/a.txt", "in/.ipynb_checkpoints/a.txt", "in/deep/b.txt", "outside/c.txt", "outside/.git/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    for link, target in (("linked", "../outside"), ("again", "../outside"), ("circle", "../in"), ("deep/up", "../..")):
        (tmp_path / "in" / link).symlink_to(target)
    found = expand_inputs([f"{tmp_path}/in"])
    assert sorted(path.resolve().name for path in found) == ["a.txt", "b.txt", "c.txt"]


def test_an_input_has_changed_if_its_content_has_whatever_its_time(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for path in files:
        path.write_text("as it was read")
    read = {str(path): fingerprint(path) for path in files}
    os.utime(files[0])
    assert first_change(read, files) is None, "touched"
    files[0].write_text("as it was ever")
    os.utime(files[0], (1, 1))
    assert first_change(read, files) == f"{files[0]}: changed since it was read", "of the same size, and older"
    assert first_change(read, files[1:]) == f"{files[0]}: missing since the inputs were read"
    assert first_change({}, files[1:]) == f"{files[1]}: new since the inputs were read"
