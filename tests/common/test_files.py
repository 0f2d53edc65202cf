import gzip
import lzma
import os
from pathlib import Path

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InputError
from common.files import BadLines, atomic_path, document_writer, expand_inputs, read_documents, read_lines, write_json
from tests.helpers import document, read_shard, write_shard


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


@pytest.mark.parametrize("cut", [1, 5, 100])
def test_a_truncated_zstd_file_is_an_error_that_names_it(tmp_path: Path, cut: int) -> None:
    path = write_shard(tmp_path / "a.jsonl.zst", [document(number, os.urandom(99).hex()) for number in range(99)])
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InputError, match=r"a\.jsonl\.zst: truncated zstd file"):
        read_shard(path)


def test_a_flipped_bit_in_a_zstd_file_is_an_error(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.jsonl.zst", [document(number, os.urandom(99).hex()) for number in range(99)])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a\.jsonl\.zst"):
        read_shard(path)


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_a_truncated_gz_or_xz_file_is_an_error_that_names_it(tmp_path: Path, suffix: str) -> None:
    packed = {"gz": gzip.compress, "xz": lzma.compress}[suffix](os.urandom(5000))
    path = tmp_path / f"urls.{suffix}"
    path.write_bytes(packed[:-20])
    with pytest.raises(InputError, match=f"urls.{suffix}: truncated"):
        list(read_lines(path))


def test_concatenated_zstd_frames_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    path.write_bytes(zstandard.compress(b"one\ntw") + zstandard.compress(b"o\nthree"))
    assert list(read_lines(path)) == [b"one", b"two", b"three"]


@given(st.lists(st.binary().map(lambda line: line.replace(b"\n", b"").replace(b"\r", b""))))
def test_lines_are_split_at_line_feeds_only(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes(b"first\n" + b"".join(line + b"\n" for line in lines))  # no byte-order mark
    assert list(read_lines(path)) == [b"first", *lines]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{broken", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"id": "a"}', "no string under 'text'"),
        (b'{"id": "a", "text": 3}', "no string under 'text'"),
        (b'{"text": "a"}', "no string under 'id'"),
        (b'{"id": "a", "text": "\\ud800"}', "not JSON"),
    ],
)
def test_a_bad_line_is_located_and_counted(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(orjson.dumps(document(1, "x")) + b"\n" + line + b"\n" + orjson.dumps(document(2, "y")) + b"\n")
    bad = BadLines(max_share=0.5)
    assert [found["text"] for found in read_documents(path, bad)] == ["x", "y"]
    assert (bad.bad, bad.lines) == (1, 3)
    assert bad.first.startswith(f"{path}:2: ") and problem in bad.first
    bad.check()
    with pytest.raises(InputError, match="1 of 3 lines are bad"):
        strict = BadLines(max_share=0.1)
        list(read_documents(path, strict))
        strict.check()


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
