import bz2
import gzip
import lzma
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import EncodingError, InputError
from common.files import read_blocks, read_json, read_lines, read_text

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


@pytest.mark.parametrize("suffix", PACK)
def test_a_compressed_file_is_whole_or_an_error_that_names_it(tmp_path: Path, suffix: str) -> None:
    path, packed = tmp_path / f"urls.{suffix}", PACK[suffix](b"one\n")
    long = PACK[suffix](os.urandom(5000))
    cuts = [long[:-cut] for cut in (1, 5, 100)]
    flipped = long[:2500] + bytes([long[2500] ^ 4]) + long[2501:]
    garbage = packed + 9 * b"garbage"
    for data in (b"", packed[:2], garbage, packed + PACK[suffix](b"two\n")[:-3], bytes(5000), flipped, *cuts):
        path.write_bytes(data)
        with pytest.raises(InputError, match=rf"urls\.{suffix}: "):
            list(read_lines(path))
    path.write_bytes(packed + PACK[suffix](b"") + PACK[suffix](b"two"))
    assert list(read_lines(path)) == [b"one", b"two"]
    path.write_bytes(PACK[suffix](b""))
    assert list(read_lines(path)) == []


@settings(max_examples=50)
@given(st.lists(st.binary().map(lambda line: line.replace(b"\n", b"").replace(b"\r", b""))))
def test_lines_are_split_at_line_feeds_only(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes(b"first\n" + b"".join(line + b"\n" for line in lines))  # no byte-order mark
    assert list(read_lines(path)) == [b"first", *lines]


def test_an_utf8_mark_is_skipped_once_wherever_text_is_read_and_other_marks_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert (read_json(path), read_text(path), list(read_lines(path))) == ({"a": 1}, '{"a": 1}', [b'{"a": 1}'])
    path.write_bytes(b"\xef\xbb\xbf\xef\xbb\xbfx\r\ny")
    assert list(read_lines(path)) == ["\ufeffx".encode(), b"y"]
    for encoding in ("utf-16-le", "utf-16-be"):
        path.write_bytes("\ufeffhttp://a.example/\n".encode(encoding))
        with pytest.raises(EncodingError, match=r"a\.json: UTF-"):
            list(read_lines(path))


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    data = b"".join(b"line %d\n" % number for number in range(100_000))
    path = tmp_path / "pipe.gz"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(gzip.compress(data),))
    writer.start()
    assert b"".join(read_blocks(path)) == data
    writer.join()
