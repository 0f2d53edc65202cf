"""Reads text files as lines, blocks and rows: decompresses by suffix, skips a byte-order mark, reports damage.

Regular files, pipes (`<(zcat …)`) and `-` (stdin) are all read once, in order.
"""

import bz2
import csv
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import orjson
import zstandard

from common.errors import EncodingError, InputError
from common.files.writing import naming

_CHUNK = 1 << 20  # bytes read at a time
_MARK = b"\xef\xbb\xbf"  # UTF-8's byte-order mark
_READABLE = (stat.S_ISREG, stat.S_ISFIFO, stat.S_ISCHR)


_PACKED = "-compressed; decompress it, or end its name in {} if it is text"
_CONVERT = "; convert it to JSON lines"
_FOREIGN = {
    b"\xff\xff\xff\xff": "Arrow" + _CONVERT,
    b"ARROW1\0\0": "Arrow" + _CONVERT,
    b"PAR1\x15": "Parquet" + _CONVERT,
    b"\xff\xfe": "UTF-16 text (it begins with that byte-order mark); convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text (it begins with that byte-order mark); convert it to UTF-8",
    b"\0\0\xfe\xff": "UTF-32 text (it begins with that byte-order mark); convert it to UTF-8",  # FF FE 00 00, too
    b"\x1f\x8b\x08": "gzip" + _PACKED.format(".gz"),
    b"\x28\xb5\x2f\xfd": "zstd" + _PACKED.format(".zst"),
    b"\xfd7zXZ\0": "xz" + _PACKED.format(".xz"),
    b"BZh91AY&SY": "bzip2" + _PACKED.format(".bz2"),
    b"PK\x03\x04": "a zip archive; unpack it",
    b"WARC/": "WARC; python -m corpus.scrape --warc extracts its pages",
    b"filedesc://": "ARC; convert it: warcio recompress FILE.arc.gz FILE.warc.gz",
}
_HEAD = 512  # bytes that `foreign` needs; tar's name is at byte 257


def foreign(head: bytes) -> str:
    """What a file that begins with `head` is, and the cure; empty if it may be text."""
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it"
    return next((name for magic, name in _FOREIGN.items() if head.startswith(magic)), "")


class _Decompressor(Protocol):
    """Decompressor of one gzip member, zstd frame, bzip2 or xz stream, with the interface of `bz2` and `lzma`."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int = -1, /) -> bytes: ...


class _GzipMember:
    """Decompressor of one gzip member."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail

    def decompress(self, data: bytes, max_length: int = -1, /) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, max(0, max_length))


class _ZstdFrame:
    """Decompressor of one zstd frame; a skippable frame yields no bytes."""

    needs_input = True

    def __init__(self) -> None:
        # 2**31: Pushshift dumps use long windows
        self._frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    def decompress(self, data: bytes, max_length: int = -1, /) -> bytes:
        return self._frame.decompress(data)


_FORMATS: dict[str, tuple[str, Callable[[], _Decompressor]]] = {
    ".gz": ("gzip", _GzipMember),
    ".bz2": ("bzip2", bz2.BZ2Decompressor),
    ".xz": (
        "xz",
        partial(lzma.LZMADecompressor, lzma.FORMAT_XZ),
    ),  # with FORMAT_AUTO, zeros would be an empty .lzma file
    ".zst": ("zstd", _ZstdFrame),
}
COMPRESSED = tuple(_FORMATS)
"""Suffixes of compressed files that can be read."""


def _decompressed(blocks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """The decompressed bytes of all frames of a file, which must have at least one.

    Raises InputError for a truncated frame, other bytes between or after frames, and an empty file.
    """
    name, new_frame = _FORMATS[path.suffix]
    frame, started, frames, head = new_frame(), False, 0, b""
    try:
        for data in blocks:
            head = head or data[:_HEAD]
            while True:
                if frames and not started and name in ("gzip", "xz"):
                    data = data.lstrip(b"\0")  # both formats allow zero padding
                if not data and frame.needs_input:
                    break
                started = True
                if chunk := frame.decompress(data, _CHUNK):
                    yield chunk
                data = b""
                if frame.eof:
                    data, frame, started, frames = frame.unused_data, new_frame(), False, frames + 1
    except (zstandard.ZstdError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # bz2 reports damage as a bare OSError
            raise
        found = foreign(head)
        damaged = not found or found.startswith(name)
        raise InputError(
            f"{path}: damaged {name} file ({error}); create it again" if damaged else f"{path}: {found}"
        ) from None
    if started:
        raise InputError(f"{path}: truncated {name} file; create it again")
    if not frames:
        raise InputError(f"{path}: 0 bytes are no {name} file; create it again")


def _unmarked(chunks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """The chunks of a text without its byte-order mark. Raises EncodingError for another encoding or format."""
    head = b""
    while len(head) < _HEAD and (chunk := next(chunks, b"")):
        head += chunk
    if found := foreign(head):
        raise EncodingError(f"{path}: {found}")
    if head := head.removeprefix(_MARK):
        yield head
    yield from chunks


def is_readable(path: Path) -> bool:
    """Whether a path can be read like a file: a regular file, a pipe, a terminal, /dev/null or stdin."""
    if str(path) == "-":
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return any(kind(mode) for kind in _READABLE)


def _chunks(path: Path, size: int) -> Iterator[bytes]:
    """The decompressed text of a file, about `size` bytes at a time."""
    if str(path) == "-":
        yield from _unmarked(iter(partial(sys.stdin.buffer.read, size), b""), path)
        return
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if not is_readable(path):
        raise InputError(f"{path}: not a file")
    with open(path, "rb") as file, naming(path):
        blocks = iter(partial(file.read, size), b"")
        yield from _unmarked(_decompressed(blocks, path) if path.suffix in _FORMATS else blocks, path)


def read_blocks(path: Path, size: int | None = None, longest: int | None = None) -> Iterator[bytes]:
    """Blocks of complete lines, about `size` bytes (default 1 MB) each, decompressed by suffix. `-` is stdin.

    A line of more than `longest` bytes is cut, but stays longer than that. Raises InputError if the file is missing,
    truncated, damaged, or compressed and empty; EncodingError for another encoding or format.
    """
    rest: list[bytes] = []  # parts of a line that spans chunks
    held = 0  # their bytes
    for chunk in _chunks(path, size or _CHUNK):
        if longest is not None and held > longest:
            chunk = b"".join(chunk.partition(b"\n")[1:])
        end = chunk.rfind(b"\n") + 1
        if end:
            yield b"".join([*rest, chunk[:end]])
            rest.clear()
            held = 0
        rest.append(chunk[end:])
        held += len(rest[-1])
    if last := b"".join(rest):
        yield last


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without line ends; errors as in `read_blocks`."""
    return (line for block in read_blocks(path) for line in split_lines(block))


def split_lines(block: bytes) -> Iterator[bytes]:
    """The lines of a block without line ends."""
    return (line.rstrip(b"\r") for line in block.removesuffix(b"\n").split(b"\n"))


def read_text(path: Path, longest: int | None = None) -> str:
    """A whole text file with its line ends. Errors as in `read_blocks`.

    Raises EncodingError if it is not UTF-8, or has more than `longest` bytes.
    """
    blocks, size = [], 0
    for block in read_blocks(path, longest=longest):
        blocks.append(block)
        size += len(block)
        if longest is not None and size > longest:
            raise EncodingError(f"{path}: longer than {longest:,} bytes; split it into documents")
    try:
        return b"".join(blocks).decode()
    except UnicodeDecodeError as error:
        raise EncodingError(f"{path}: not UTF-8 at byte {error.start}; convert it, or create it again") from None


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises InputError if it is missing or not JSON."""
    try:
        return orjson.loads(read_text(path))
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file that is appended to; none if it does not exist. An incomplete last row is ignored.

    Raises InputError for a file that is not UTF-8, and for a row with another number of cells than the header.
    """
    if not path.is_file():
        return []
    lines = read_text(path).rpartition("\n")[0].splitlines()
    reader, rows = csv.DictReader(lines), []
    try:
        for row in reader:
            if None in row or None in row.values():
                raise InputError(f"{path}:{reader.line_num}: not {len(reader.fieldnames or ())} cells; delete the line")
            rows.append(row)
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: not CSV ({error}); delete the line") from None
    return rows
