import fcntl
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from common.errors import InputError
from common.files import (
    atomic_path,
    atomic_paths,
    document_writer,
    naming,
    output_files,
    scratch_file,
    sharded_writer,
    write_json,
    write_text,
)
from corpus.dedup.segments import write_segments
from corpus.index import IndexWriter, Meta
from tests.helpers import document, prose, read_shard, write_shard


@contextmanager
def no_space(limit: int) -> Iterator[None]:
    """Limit the size of files to simulate a full disk, with EFBIG instead of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def reader(path: Path) -> Iterator[list[bytes]]:
    """A pipe, and the bytes that arrive at its other end."""
    os.mkfifo(path)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(path.read_bytes()))
    thread.start()
    yield found
    thread.join(timeout=20)


def test_a_shard_comes_back_as_it_was_written(tmp_path: Path) -> None:
    documents = [document(number, f"text {number} é\n") for number in range(1000)]
    assert read_shard(write_shard(tmp_path / "a.jsonl.zst", documents)) == documents


def test_equal_documents_make_equal_bytes(tmp_path: Path) -> None:
    documents = [document(number, "text " * number) for number in range(50)]
    first = write_shard(tmp_path / "a.jsonl.zst", documents).read_bytes()
    assert write_shard(tmp_path / "b.jsonl.zst", documents).read_bytes() == first


def test_an_error_while_writing_leaves_no_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.jsonl.zst", [document(1, "old")])
    with pytest.raises(RuntimeError), document_writer(path) as write:
        write(document(2, "new"))
        raise RuntimeError
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl.zst"]
    assert read_shard(path)[0]["text"] == "old"


def test_what_a_killed_writer_left_is_overwritten_whole(tmp_path: Path) -> None:
    (tmp_path / "a.json.tmp").write_bytes(b"x" * 1000)
    write_json(tmp_path / "a.json", {})
    assert (tmp_path / "a.json").read_text() == "{}\n"


def test_two_writers_of_one_file_are_told_apart(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "a") as temporary:
        temporary.write_text("first")
        with pytest.raises(InputError, match="another process is writing it"), atomic_path(tmp_path / "a"):
            pass
    assert (tmp_path / "a").read_text() == "first"


def test_a_lock_on_a_file_that_its_writer_has_just_renamed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    flock = fcntl.flock
    with ExitStack() as first:
        for temporary in first.enter_context(atomic_paths(paths)):
            temporary.write_text("first")

        def after_the_first(file: IO[bytes], operation: int) -> None:
            first.close()
            flock(file, operation)

        monkeypatch.setattr(fcntl, "flock", after_the_first)
        with atomic_paths(paths) as temporaries:
            assert [path.read_text() for path in paths] == ["first", "first"]
            with pytest.raises(InputError, match="another process is writing it"), atomic_paths(paths):
                pass
            for temporary in temporaries:
                temporary.write_text("second")
    assert [path.read_text() for path in paths] == ["second", "second"]


def test_a_link_is_followed_and_its_target_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/target").write_text("old")
    (tmp_path / "link").symlink_to("disk/target")
    (tmp_path / "to_nothing").symlink_to("new/target")
    for name in ("link", "to_nothing"):
        write_text(tmp_path / name, "new")
        assert (tmp_path / name).is_symlink() and (tmp_path / name).read_text() == "new"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["target"]
    with pytest.raises(RuntimeError), atomic_path(tmp_path / "link") as temporary:
        assert temporary == tmp_path / "disk/target.tmp"
        raise RuntimeError
    assert (tmp_path / "link").read_text() == "new"


def test_a_pipe_is_opened_once_and_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.files.shards._HELD", 100)  # flushes often
    documents = [document(number, prose(number)) for number in range(9)]
    for name in ("one.jsonl", "one.jsonl.zst"):
        with reader(tmp_path / name) as found:
            write_shard(tmp_path / name, documents)
        (tmp_path / f"copy.{name}").write_bytes(found[0])
        assert read_shard(tmp_path / f"copy.{name}") == documents
        with reader(tmp_path / f"sharded.{name}") as found:
            with sharded_writer([tmp_path / f"sharded.{name}", tmp_path / f"regular.{name}"]) as write:
                for number, one in enumerate(documents):
                    write(number % 2, one)
        (tmp_path / f"copy.{name}").write_bytes(found[0])
        assert read_shard(tmp_path / f"copy.{name}") == documents[::2]
        assert read_shard(tmp_path / f"regular.{name}") == documents[1::2]
    with reader(tmp_path / "segments") as found, write_segments(tmp_path / "segments", {}):
        pass
    assert found[0].startswith(b"DEDUPSG1")


def test_an_open_descriptor_keeps_its_place_in_a_file(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb", buffering=0) as file:
        file.write(b"before ")
        write_text(Path(f"/dev/fd/{file.fileno()}"), "between ")
        file.write(b"after")
    assert (tmp_path / "log").read_bytes() == b"before between after"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_device_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    before = os.stat("/dev/null")
    (tmp_path / "null").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "null"):
        write_json(path, {})
        with output_files([path, path]) as outputs:
            outputs[1].append(b"x")
    after = os.stat("/dev/null")
    assert (before.st_ino, before.st_rdev, before.st_mode) == (after.st_ino, after.st_rdev, after.st_mode)
    assert (tmp_path / "null").is_symlink()
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_text(Path("/dev/full"), "x")


@pytest.mark.parametrize("name", [".", "/", "folder", "file/below", "file/far/below", "/dev/fd/99", "circle", "socket"])
def test_what_is_no_output_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("old")
    Path("circle").symlink_to("circle")
    subprocess.run(
        ["python3", "-c", "import socket; socket.socket(socket.AF_UNIX).bind('socket')"], check=True, cwd=tmp_path
    )
    with pytest.raises(InputError, match=f"^{name}: .*; (choose another|name a)"):
        write_text(Path(name), "x")
    assert Path("file").read_text() == "old" and sorted(os.listdir()) == ["circle", "file", "folder", "socket"]


def test_writers_that_need_names_refuse_streams(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="/dev/null: is not a regular file"), atomic_paths([Path("/dev/null")]):
        pass
    (tmp_path / "a.bin").symlink_to("/dev/null")
    with pytest.raises(InputError, match=r"a\.bin: is not a regular file"), IndexWriter(tmp_path / "a", "<u2"):
        pass


def test_a_dataset_may_be_links_to_another_disk(tmp_path: Path) -> None:
    for suffix in ("bin", "idx", "json"):
        (tmp_path / f"a.{suffix}").symlink_to(f"disk/b.{suffix}")
    for _ in range(2):
        with IndexWriter(tmp_path / "a", "<u2", Meta(vocab_size=10, end_of_text=9)) as index:
            index.add_document([1, 2, 9])
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["b.bin", "b.idx", "b.json"]
    assert all((tmp_path / f"a.{suffix}").is_symlink() for suffix in ("bin", "idx", "json"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
def test_a_full_disk_is_told_with_the_name_of_the_file_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    documents = [document(number, prose(number)) for number in range(300)]
    with pytest.raises(OSError, match=f"{name}'$") as error, no_space(20_000):
        write_shard(tmp_path / name, documents)
    assert error.value.filename == str(tmp_path / name)
    with pytest.raises(OSError, match=f"{name}'$"), no_space(20_000):
        with sharded_writer([tmp_path / name]) as write:
            for one in documents:
                write(0, one)
    assert not list(tmp_path.iterdir())


def test_every_file_of_a_dataset_is_named_when_the_disk_is_full(tmp_path: Path) -> None:
    for tokens, documents, name in ((50_000, 1, "a.bin"), (1, 30_000, "a.idx")):
        with pytest.raises(OSError, match=f"{name}'$"), no_space(60_000):
            with IndexWriter(tmp_path / "a", "<u2") as index:
                index.add_documents([1] * tokens * documents, [tokens] * documents)
    with pytest.raises(OSError, match=r"spool'$"), no_space(10_000), scratch_file(tmp_path / "spool") as file:
        file.write(bytes(99_999))
    assert not list(tmp_path.iterdir())


def test_an_error_that_has_a_name_keeps_it() -> None:
    with pytest.raises(FileNotFoundError, match="'/none'"), naming(Path("other")):
        Path("/none").read_bytes()
    with pytest.raises(OSError, match="full: 'other'"), naming(Path("other")):
        raise OSError(28, "full")
    with document_writer(Path("/dev/null")) as write:
        write({})
