import bz2
import gzip
import lzma
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from common.errors import EncodingError, InputError
from common.files import read_blocks, read_json, read_lines, read_rows, read_text
from tests.helpers import document, read_shard, write_shard

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}
SKIPPABLE = struct.pack("<II", 0x184D2A50, 2_000_000) + bytes(2_000_000)  # longer than one chunk


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


@pytest.mark.parametrize("suffix", PACK)
def test_a_compressed_file_is_whole_or_an_error_that_names_it(tmp_path: Path, suffix: str) -> None:
    path, packed = tmp_path / f"urls.{suffix}", PACK[suffix](b"one\n")
    for data, problem in (
        (b"", "0 bytes"),
        (packed[:-3], "truncated"),
        (packed[:2], "truncated"),
        (packed + 9 * b"garbage", "damaged"),
        (packed + PACK[suffix](b"two\n")[:-3], "truncated"),
        (bytes(5000), "damaged"),
    ):
        path.write_bytes(data)
        with pytest.raises(InputError, match=rf"urls\.{suffix}: .*{problem}"):
            list(read_lines(path))
    path.write_bytes(packed + PACK[suffix](b"") + PACK[suffix](b"two"))
    assert list(read_lines(path)) == [b"one", b"two"]
    path.write_bytes(PACK[suffix](b""))
    assert list(read_lines(path)) == []


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_padding_after_a_stream_is_no_damage(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(PACK[suffix](b"one\n") + bytes(512) + PACK[suffix](b"two\n") + bytes(8))
    assert list(read_lines(path)) == [b"one", b"two"]


def test_skippable_frames_give_nothing_and_may_not_be_cut(tmp_path: Path) -> None:
    path, frame = tmp_path / "a.zst", zstandard.compress(b"one\n")
    for data, lines in ((SKIPPABLE, []), (SKIPPABLE + frame + SKIPPABLE, [b"one"])):
        path.write_bytes(data)
        assert list(read_lines(path)) == lines
        path.write_bytes(data[:-1])
        with pytest.raises(InputError, match=r"a\.zst: truncated zstd file"):
            list(read_lines(path))


def test_a_compressed_file_that_grows_a_thousandfold_is_read_in_small_pieces(tmp_path: Path) -> None:
    for suffix in ("gz", "bz2", "xz"):
        path = tmp_path / f"a.{suffix}"
        path.write_bytes(PACK[suffix]((b"x" * 99 + b"\n") * 40_000))
        assert max(map(len, read_blocks(path))) <= 2 << 20


def test_concatenated_zstd_frames_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    path.write_bytes(zstandard.compress(b"one\ntw") + zstandard.compress(b"o\nthree"))
    assert list(read_lines(path)) == [b"one", b"two", b"three"]


@given(st.lists(st.binary().map(lambda line: line.replace(b"\n", b"").replace(b"\r", b""))))
def test_lines_are_split_at_line_feeds_only(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes(b"first\n" + b"".join(line + b"\n" for line in lines))  # no byte-order mark
    assert list(read_lines(path)) == [b"first", *lines]


def test_an_utf8_mark_is_skipped_once_wherever_text_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert (read_json(path), read_text(path), list(read_lines(path))) == ({"a": 1}, '{"a": 1}', [b'{"a": 1}'])
    path.write_bytes(b"\xef\xbb\xbf")
    assert list(read_lines(path)) == []
    path.write_bytes(b"\xef\xbb\xbf\xef\xbb\xbfx\r\ny")
    assert list(read_lines(path)) == ["\ufeffx".encode(), b"y"]
    packed = tmp_path / "a.zst"  # the mark spans chunks
    packed.write_bytes(b"".join(zstandard.compress(bytes([byte])) for byte in b"\xef\xbb\xbfab"))
    assert list(read_lines(packed)) == [b"ab"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
def test_other_marks_are_an_error_that_says_what_it_is(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes(
        ("" if encoding in ("utf-16", "utf-32") else "\ufeff").encode(encoding) + "http://a.example/\n".encode(encoding)
    )
    with pytest.raises(EncodingError, match=r"a\.txt: UTF-(16|32) text .* convert it to UTF-8"):
        list(read_lines(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("a.jsonl", zstandard.compress(b"{}"), "zstd-compressed; decompress it, or end its name in .zst"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "gzip-compressed"),
        ("a.jsonl", bz2.compress(b"{}"), "bzip2-compressed"),
        ("a.jsonl", lzma.compress(b"{}"), "xz-compressed"),
        ("a.jsonl.gz", zstandard.compress(b"{}"), "zstd-compressed"),
        ("a.jsonl.zst", b"PAR1\x15\x04\x15", "Parquet; convert it to JSON lines"),
        ("a.txt.gz", gzip.compress(bytes(257) + b"ustar", mtime=0), "a tar archive"),
    ],
)
def test_a_file_of_another_format_is_named_as_what_it_is(tmp_path: Path, name: str, data: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=rf"{name}: {problem}"):
        list(read_lines(tmp_path / name))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"iteration,loss\n1,caf\xe9\n", "not UTF-8 at byte 20"),
        ("iteration,loss\n1,2\n".encode("utf-16"), "UTF-16"),
        (b"iteration,loss\n1,2\n\0\0\0\0\n3,4\n", ":3: not 2 cells"),
        (b"iteration,loss\n1,2,3\n", ":2: not 2 cells"),
    ],
)
def test_a_curve_that_is_no_table_is_an_error_that_names_it(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "train.csv").write_bytes(data)
    with pytest.raises(InputError, match=rf"train\.csv.*{problem}"):
        read_rows(tmp_path / "train.csv")


def test_a_curve_may_be_absent_empty_torn_or_marked(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    assert read_rows(path) == []
    for data, rows in ((b"", []), (b"\0" * 99, []), (b"\xef\xbb\xbfa,b\r\n1,2\r\n3,", [{"a": "1", "b": "2"}])):
        path.write_bytes(data)
        assert read_rows(path) == rows


@pytest.mark.parametrize("suffix", ["", *(f".{suffix}" for suffix in PACK)])
def test_a_pipe_is_read_like_a_file(tmp_path: Path, suffix: str) -> None:
    data = b"".join(b"line %d\n" % number for number in range(100_000))
    path = tmp_path / f"pipe{suffix}"
    os.mkfifo(path)
    packed = PACK[suffix[1:]](data) if suffix else data
    writer = threading.Thread(target=path.write_bytes, args=(packed,))
    writer.start()
    assert b"".join(read_blocks(path)) == data
    writer.join()


def test_a_descriptor_of_this_process_is_read_also_a_socket(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"one\ntwo")
    theirs.close()
    with ours:
        assert list(read_lines(Path(f"/dev/fd/{ours.fileno()}"))) == [b"one", b"two"]
    assert list(read_lines(Path("/dev/null"))) == []
