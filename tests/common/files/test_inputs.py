import os
from pathlib import Path

import pytest

from common.errors import InputError
from common.files import expand_inputs, reject_writer, require_regular
from tests.helpers import document, write_shard


def below(folder: Path, paths: list[Path]) -> list[str]:
    return [str(path.relative_to(folder)) for path in paths]


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step's folder: two shards, and all the other files that a run leaves there."""
    for name in ("0000.jsonl.zst", "0001.jsonl.zst", "more/0002.jsonl"):
        write_shard(tmp_path / name, [document(1, "text")])
    for name, count in (("rejects/0000", 2), ("removed/0001", 1), ("rejects/0002", 0), ("elsewhere", 1)):
        with reject_writer(tmp_path / f"{name}.jsonl.zst", "clean") as reject:
            for number in range(count):
                reject({**document(number, "x" * 100_000), "reason": "short"})
    write_shard(tmp_path / "0000.rejects.jsonl.zst", [document(1, "of an older version")])
    for name in ("0000.stats.json", "stats.json", "0000.counts.json", "clusters.json", "0000.jsonl.zst.tmp"):
        (tmp_path / name).write_text("{}")
    for name in ("0003.jsonl.zst.journal", "0000.warc.gz", ".hidden.jsonl", ".git/x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    os.mkfifo(tmp_path / "pipe.jsonl")
    return tmp_path


def test_inputs_are_files_folders_and_globs_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.txt", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [str(path.relative_to(tmp_path)) for path in expand_inputs([str(tmp_path)])]
    assert names == ["a.txt", "b.txt", "deep/c.txt"]
    assert [path.name for path in expand_inputs([f"{tmp_path}/*.txt"])] == ["a.txt", "b.txt"]


@pytest.mark.parametrize("pattern", ["missing.txt", "*.nothing", "empty"])
def test_an_input_that_matches_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=pattern.replace("*", r"\*")):
        expand_inputs([pattern])


def test_a_folder_stands_for_its_shards_and_says_what_it_leaves_out(
    step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert below(step, expand_inputs([str(step)], "shards")) == ["0000.jsonl.zst", "0001.jsonl.zst", "more/0002.jsonl"]
    (note,) = capsys.readouterr().err.splitlines()
    assert "3 shards of documents, 13 left out: " in note and "0000.counts.json" in note


def test_globs_and_lists_leave_out_what_is_no_input_either(step: Path) -> None:
    shards = ["0000.jsonl.zst", "0001.jsonl.zst"]
    assert below(step, expand_inputs([f"{step}/*.jsonl.zst"], "shards")) == shards
    assert below(step, expand_inputs([f"{step}/**/*.zst"], "lists")) == shards
    lists = ["0000.jsonl.zst", "0000.warc.gz", "0001.jsonl.zst", "more/0002.jsonl"]
    assert below(step, expand_inputs([str(step)], "lists")) == lists
    assert below(step, expand_inputs([f"{step}/*.counts.json"])) == ["0000.counts.json"]
    with pytest.raises(InputError, match=r"rejects: holds no shards of documents \(2 left out: "):
        expand_inputs([f"{step}/rejects"], "shards")


@pytest.mark.parametrize(
    "name",
    [
        "rejects/0000.jsonl.zst",
        "rejects/0002.jsonl.zst",
        "removed/0001.jsonl.zst",
        "elsewhere.jsonl.zst",
        "0000.rejects.jsonl.zst",
    ],
)
@pytest.mark.parametrize("kind", ["shards", "lists"])
def test_rejects_that_are_named_are_refused(step: Path, name: str, kind: str) -> None:
    with pytest.raises(InputError, match=rf"{name}:1: rejects of a step"):
        expand_inputs([f"{step}/{name}"], kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["0000.stats.json", "0000.jsonl.zst.tmp", "0003.jsonl.zst.journal", "clusters.json"])
def test_statistics_and_unfinished_files_are_no_shards_even_where_they_are_named(step: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"{name}: not a shard"):
        expand_inputs([f"{step}/{name}"], "shards")


def test_links_to_folders_are_followed_each_folder_once_and_never_in_circles(tmp_path: Path) -> None:
    for name in ("in/a.txt", "in/.ipynb_checkpoints/a.txt", "in/deep/b.txt", "outside/c.txt", "outside/.git/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "in/linked").symlink_to("../outside")
    (tmp_path / "in/again").symlink_to("../outside")
    (tmp_path / "in/circle").symlink_to("../in")
    (tmp_path / "in/deep/up").symlink_to("../..")
    for pattern in ("in", "in/**", "in/**/*.txt", "in/*"):
        files = expand_inputs([f"{tmp_path}/{pattern}"])
        assert sorted({path.resolve() for path in files}) == sorted(path.resolve() for path in files)
        assert {path.name for path in files} == {"a.txt", "b.txt", "c.txt"}, pattern
    (tmp_path / "in/broken.txt").symlink_to("nowhere")
    assert "in/broken.txt" in below(tmp_path, expand_inputs([f"{tmp_path}/in"])), "its reader says that it is not there"


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("x")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(PermissionError, match="closed"):
        expand_inputs([str(tmp_path)])


def test_the_empty_string_is_no_input() -> None:
    with pytest.raises(InputError, match="empty string"):
        expand_inputs([""])


def test_pipes_and_devices_are_inputs_but_not_for_steps_that_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    paths = expand_inputs([str(tmp_path / "pipe"), "/dev/null", "-"], "shards")
    assert len(paths) == 3
    for path in paths:
        with pytest.raises(InputError, match=f"{path}: is not a regular file, and dedup reads it more than once"):
            require_regular([path], "dedup")
