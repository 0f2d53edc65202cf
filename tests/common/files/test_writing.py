import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from common.errors import InputError
from common.files import (
    atomic_path,
    cache_path,
    check_outputs,
    document_writer,
    output_files,
    scratch_file,
    write_json,
    write_text,
    writing,
)
from common.files.writing import replace_folder, swap_folder
from tests.helpers import document, read_shard, write_shard


def test_an_error_while_writing_leaves_no_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.jsonl.zst", [document(1, "old")])
    with pytest.raises(RuntimeError), document_writer(path) as write:
        write(document(2, "new"))
        raise RuntimeError
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl.zst"]
    assert read_shard(path)[0]["text"] == "old"
    (tmp_path / "b.json.tmp").write_bytes(b"x" * 1000)  # of a killed writer
    write_json(tmp_path / "b.json", {})
    assert (tmp_path / "b.json").read_text() == "{}\n" and len(list(tmp_path.iterdir())) == 2


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, fsync = list[tuple[str, int, bool]](), os.fsync
    result = tmp_path / "result"

    def record(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append((path.name, path.stat().st_size if path.is_file() else 0, (result / "a").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with output_files([result / "a", result / "b"]) as outputs:
        for size, output in enumerate(outputs, start=1):
            output.append(b"x" * size)
    assert flushed == [("a.tmp", 1, False), ("b.tmp", 2, False), ("result", 0, True)]
    flushed.clear()
    (result / "a").unlink()
    with replace_folder(result) as new:
        (new / "a").write_text("abc")
    assert ("a", 3, False) in flushed and flushed[-1] == (tmp_path.name, 0, True)


def test_two_writers_of_one_file_are_told_apart(tmp_path: Path) -> None:
    with output_files([tmp_path / "a", tmp_path / "b"]) as outputs:
        for output in outputs:
            output.append(b"first")
        with pytest.raises(InputError, match=r"a\.tmp"), atomic_path(tmp_path / "a"):
            pass
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == "first"


def test_of_several_writers_of_a_small_file_or_a_cache_none_is_refused_and_readers_see_a_whole_one(
    tmp_path: Path,
) -> None:
    path, cache, begin = tmp_path / "a.json", tmp_path / "cache", Barrier(8)
    texts = [f"{number}" * 70_000 for number in range(8)]
    with cache_path(cache) as slow:  # begun before all others
        slow.write_text("slow")

        def write(text: str) -> None:
            begin.wait()
            for _ in range(5):
                write_text(path, text)
                with cache_path(cache) as temporary:
                    temporary.write_text(text)
                assert path.read_text() in texts and cache.read_text() in texts

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, texts))
    assert cache.read_text() == "slow" and sorted(tmp_path.iterdir()) == [path, cache]


@pytest.fixture
def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has several names of one file."""
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("a")
    os.link("a", "hard")
    Path("deep").mkdir()
    for link, target in (("soft", "a"), ("dangling", "new"), ("round", "deep")):
        Path(link).symlink_to(target)


@pytest.mark.parametrize(
    "pair",
    "a:deep/../a a:soft a:hard new:dangling new:new deep/x:round/x".split(),
)
def test_two_outputs_that_are_one_file_are_refused(linked: None, pair: str) -> None:
    names = pair.split(":")
    for one, other in (names, names[::-1]):
        with pytest.raises(InputError, match=f"^{Path(other)}: .*{Path(one)}"):
            check_outputs([Path(one), None, Path(other)])


@pytest.mark.parametrize("name", ["a", "./a", "soft", "hard", "deep/../a"])
def test_an_output_that_is_an_input_is_refused(linked: None, name: str) -> None:
    with pytest.raises(InputError, match=f"^{Path(name)}: .*input a"):
        check_outputs([Path(name)], [Path("a")])


def folder(path: Path, content: str) -> Path:
    path.mkdir(parents=True)
    (path / "file").write_text(content)
    return path


def refuse(old: Path) -> None:
    raise InputError("not ours")


def test_a_swap_keeps_the_older_folder_under_another_name_or_restores_it(tmp_path: Path) -> None:
    new, old = folder(tmp_path / "new", "new"), folder(tmp_path / "result", "old")
    with pytest.raises(InputError):
        swap_folder(new, old, tmp_path / "aside", refuse)
    with pytest.raises(FileNotFoundError):
        swap_folder(tmp_path / "absent", old, tmp_path / "aside")
    assert (old / "file").read_text() == "old" and not (tmp_path / "aside").exists()
    swap_folder(new, old, tmp_path / "aside")
    assert (old / "file").read_text() == "new" and (tmp_path / "aside/file").read_text() == "old"


def test_a_replaced_folder_is_gone_and_a_refused_one_or_one_that_is_being_written_stays(tmp_path: Path) -> None:
    result = tmp_path / "deep/result"
    for content in ("first", "second"):
        with replace_folder(result) as new:
            folder(new / "inner", content)
            (new / "file").write_text(content)
            with pytest.raises(InputError, match="result: "), replace_folder(result):
                pass
    with pytest.raises(InputError), replace_folder(result, refuse) as new:
        (new / "file").write_text("third")
    assert (result / "file").read_text() == "second"
    assert [path.name for path in result.parent.iterdir()] == ["result"]


def test_what_a_killed_command_left_is_removed_and_the_older_folder_put_back(tmp_path: Path) -> None:
    result = tmp_path / "result"
    folder(tmp_path / "result.partial/new", "half")
    folder(tmp_path / "result.partial/old", "older")
    folder(tmp_path / "result.partial/mine", "mine")
    (tmp_path / "result.partial/lock").touch()
    with pytest.raises(InputError), replace_folder(result, refuse):
        pass
    assert (result / "file").read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result", "result.partial"]


def test_a_full_disk_under_a_file_without_a_name_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scratch_file(tmp_path) as file:
        file.write(b"text")
        file.seek(0)
        assert file.read() == b"text" and list(tmp_path.iterdir()) == []
    with open("/dev/full", "r+b", buffering=0) as full:
        monkeypatch.setattr(writing, "TemporaryFile", lambda dir: full)
        file = scratch_file(tmp_path)
    file.write(b"text")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
        file.close()
