import bz2
import gzip
import lzma
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import EncodingError, InputError
from common.files import is_binary, read_blocks, read_json, read_lines, read_text

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


@pytest.mark.parametrize("suffix", PACK)
def test_a_compressed_file_is_whole_or_an_error_that_names_it(tmp_path: Path, suffix: str) -> None:
    path, packed = tmp_path / f"urls.{suffix}", PACK[suffix](b"one\n")
    long = PACK[suffix](random.Random(5).randbytes(5000))
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
    path.write_bytes(PACK[suffix](b"") + bytes(8) + packed + bytes(3 << 20))  # a tape's padding, an xz stream's
    if suffix in ("gz", "xz"):
        assert list(read_lines(path)) == [b"one"]
    else:
        with pytest.raises(InputError, match="damaged"):
            list(read_lines(path))


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


def test_binary_formats_are_known_by_their_first_bytes_and_no_text_is_one_of_them() -> None:
    binaries = [
        b"%PDF-1.4", b"PK\x03\x04", b"\x1f\x8b\x08\0", b"\xfd7zXZ\0", b"BZh91AY", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf",
        b"Rar!\x1a\x07\0", b"ID3\x03\0", b"\xff\xfb\x90d", b"OggS\0\2", b"fLaC\0\0", b"RIFF\x10\x20\0\0WEBPVP8 ",
        b"\x7fELF\2\1", b"MZ\x90\0\3", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"\0\0\1\0", b"\0\1\0\0\0\x0f",
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", b"\x89PNG\r\n", b"\xff\xd8\xff", b"\0asm", b"GIF89a\1\0", b"II*\0",
        b"BM\x36\0\0\0\0\0", b"SQLite format 3\0", b"wOF2\0\1\0\0", b"\0\0\0\x18ftypmp42", b"\x1a\x45\xdf\xa3",
    ]  # fmt: skip
    for head in binaries:
        assert all(is_binary(blank + head) for blank in (b"", b"\r\n \t", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n")), head
    texts = (
        "RIFF and FORM",
        "MZ",
        "BMW, ID3 and GIF89a",
        "Rar!",
        "OggSpeak",
        "ORCHESTRA",
        "7z",
        "PKZIP",
        "Obj",
        "\f",
        "",
    )
    for text in (*texts, "WARC/1.0 is a format"):
        assert not is_binary(text.encode()) and not is_binary(text.encode("utf-16")), text
    for start in (b"\xff\xfe<\0", b"<\0!\0", "ÿþ".encode(), "ÿûý".encode("koi8-r", "ignore"), b"\xef\xbb\xbf<p>\0\1"):
        assert not is_binary(start), start


def test_random_bytes_are_no_text_in_an_encoding_in_which_all_bytes_are_valid(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for encoding in ("latin-1", "koi8-r", "cp437", "utf-16"):
        path.write_bytes(random.Random(7).randbytes(1500))
        with pytest.raises(EncodingError, match=r"a\.txt: (binary data|not utf-16)"):
            read_text(path, encoding=encoding)
        text = "\x1b[1mN\bNa\x0bme\x0c\x1a " + "words and words. " * 9
        path.write_text(text, encoding=encoding)
        assert read_text(path, encoding=encoding) == text


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    data = b"".join(b"line %d\n" % number for number in range(100_000))
    path = tmp_path / "pipe.gz"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(gzip.compress(data),))
    writer.start()
    assert b"".join(read_blocks(path)) == data
    writer.join()
