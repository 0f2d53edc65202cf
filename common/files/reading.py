"""Reads text files as lines, blocks and rows; decompresses by suffix, and reports damage.

Regular files, pipes (`<(zcat …)`) and `-` (stdin) are all read once, in order.
"""

import bz2
import codecs
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import zstandard

from common.errors import EncodingError, InputError
from common.files.kinds import BINARY, BYTE_ORDER_MARK, COMPRESSIONS, HEAD, is_noise, kind_of
from common.files.writing import naming

_CHUNK = 1 << 20  # bytes of text read at a time; a quarter of it if they are compressed
_NEW_FRAME: dict[str, Callable[[], Any]] = {
    ".gz": partial(zlib.decompressobj, 31),
    ".bz2": bz2.BZ2Decompressor,
    # with FORMAT_AUTO, zeros would be an empty .lzma file
    ".xz": partial(lzma.LZMADecompressor, lzma.FORMAT_XZ),
    # 2**31: Pushshift dumps use long windows
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(),
}
"""By suffix, a decompressor of one frame: a gzip member, a zstd frame, a bzip2 or xz stream."""
_PADDED = (".gz", ".xz")
COMPRESSED = tuple(_NEW_FRAME)


def read_head(path: Path) -> tuple[str, bytes]:
    """The compression of a regular file, as a suffix or "", and the beginning of its content."""
    with open(path, "rb") as file, naming(path):
        head = file.read(HEAD)
        packed = next((suffix for magic, suffix in COMPRESSIONS.items() if head.startswith(magic)), "")
        if packed:
            frame, text = _NEW_FRAME[packed](), b""
            with suppress(zstandard.ZstdError, zlib.error, lzma.LZMAError, OSError, EOFError):
                while head and not text:
                    text, head = frame.decompress(head), file.read(HEAD)
            head = text
    return packed, head


Frames = list[tuple[int, int]]
"""Per frame of a compressed file: its offset in the file, and the offset of its text."""


def decompressed(blocks: Iterator[bytes], path: Path, frames: Frames | None = None) -> Iterator[bytes]:
    """The text of a file of one or more frames; fills `frames` while reading.

    Zeros after a gzip member or an xz stream are padding and skipped, as gzip and xz do. Raises
    InputError for a truncated frame, other bytes between or after frames, and an empty file.
    """
    head, frame, read, written, skips = b"", None, 0, 0, False
    try:
        for data in blocks:
            head = head or data
            read += len(data)
            while data:
                if skips and not (data := data.lstrip(b"\0")):
                    break
                if frame is None:
                    frame = _NEW_FRAME[path.suffix]()
                    if frames is not None:
                        frames.append((read - len(data), written))
                if chunk := frame.decompress(data):
                    written += len(chunk)
                    yield chunk
                data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
                skips = frame is None and path.suffix in _PADDED
    except (zstandard.ZstdError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # bz2 reports damage as a bare OSError
            raise
        kind, cure = kind_of(head)
        damaged = f"damaged {path.suffix} file ({error}); create it again"
        raise InputError(f"{path}: {f'{kind}; {cure}' if kind and path.suffix not in kind else damaged}") from None
    if frame is not None or not head:
        raise InputError(f"{path}: truncated {path.suffix} file; create it again")


def _as_utf8(chunks: Iterator[bytes], encoding: str, path: Path) -> Iterator[bytes]:
    """Chunks of another encoding as UTF-8. Raises EncodingError if they are invalid."""
    try:
        yield from (text.encode() for text in codecs.iterdecode(chunks, encoding))
    except UnicodeError as error:
        reason = getattr(error, "reason", error)  # UTF-16 without its byte-order mark has none
        raise EncodingError(f"{path}: not {encoding} ({reason}); give its encoding, or create it again") from None


def _texts(chunks: Iterator[bytes], encoding: str, path: Path) -> Iterator[bytes]:
    """Chunks of text as UTF-8. Raises EncodingError for another encoding or format."""
    texts = chunks if encoding == "utf-8" else _as_utf8(chunks, encoding, path)
    head = b""
    for chunk in texts:
        head += chunk
        if len(head) >= len(BYTE_ORDER_MARK):  # a frame may be shorter
            break
    kind, cure = kind_of(head)
    if not kind and encoding != "utf-8" and is_noise(head):  # random bytes are not valid UTF-8
        kind, cure = "binary data", BINARY
    if kind:
        raise EncodingError(f"{path}: {kind}; {cure}")
    yield head
    yield from texts


def is_readable(path: Path) -> bool:
    """Whether a path is a regular file, a pipe, a device or `-` (stdin)."""
    return str(path) == "-" or (path.exists() and not path.is_dir())


def _chunks(path: Path, size: int, frames: Frames | None, encoding: str) -> Iterator[bytes]:
    """The decompressed text of a file as UTF-8, about `size` bytes at a time."""
    if str(path) == "-":
        # read1 returns what a pipe has, so that a signal is handled before the next wait
        yield from _texts(iter(partial(sys.stdin.buffer.read1, size), b""), encoding, path)  # type: ignore[union-attr]
        return
    if not is_readable(path):
        raise InputError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    is_packed = path.suffix in _NEW_FRAME
    with open(path, "rb") as file, naming(path):
        blocks = iter(partial(file.read, size // 4 if is_packed else size), b"")
        yield from _texts(decompressed(blocks, path, frames) if is_packed else blocks, encoding, path)


def located_blocks(
    path: Path,
    size: int | None = None,
    longest: int | None = None,
    frames: Frames | None = None,
    encoding: str = "utf-8",
) -> Iterator[tuple[int, bytes]]:
    """`read_blocks` with each block's offset in the decompressed file; fills `frames`."""
    rest: list[bytes] = []  # parts of a line that spans chunks
    held = 0  # their bytes
    start = read = 0  # where the line in `rest` and the chunk begin
    for chunk in _chunks(path, size or _CHUNK, frames, encoding):
        if read == 0 and chunk.startswith(BYTE_ORDER_MARK):
            start = read = len(BYTE_ORDER_MARK)
            chunk = chunk[start:]
        read += len(chunk)
        if longest is not None and held > longest:
            _, end_of_line, chunk = chunk.partition(b"\n")
            if not end_of_line:
                continue
            yield start, b"".join([*rest, end_of_line])
            rest, held, start = [], 0, read - len(chunk)
        end = chunk.rfind(b"\n") + 1
        if end:
            yield start, b"".join([*rest, chunk[:end]])
            rest, held, start = [], 0, read - len(chunk) + end
        rest.append(chunk[end:])
        held += len(rest[-1])
    if last := b"".join(rest):
        yield start, last


def read_blocks(
    path: Path, size: int | None = None, longest: int | None = None, encoding: str = "utf-8"
) -> Iterator[bytes]:
    """Blocks of whole lines as UTF-8, about `size` bytes (default 1 MB) each; `-` is stdin.

    A line of more than `longest` bytes is truncated, but stays longer than that. Raises InputError
    if the file is missing, truncated, damaged, or compressed and empty; EncodingError for another
    encoding or format.
    """
    return (block for _, block in located_blocks(path, size, longest, encoding=encoding))


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without line ends; raises as `read_blocks` does."""
    return (line.rstrip(b"\r") for block in read_blocks(path) for line in block.removesuffix(b"\n").split(b"\n"))


def read_text(path: Path, longest: int | None = None, encoding: str = "utf-8") -> str:
    """A whole text file with its line ends; raises as `read_blocks` does.

    EncodingError also for binary data and more than `longest` bytes.
    """
    blocks, size = [], 0
    for block in read_blocks(path, longest=longest, encoding=encoding):
        blocks.append(block)
        size += len(block)
        if longest is not None and size > longest:
            raise EncodingError(f"{path}: longer than {longest:,} bytes; split it into documents")
    text = b"".join(blocks)
    if is_noise(text):
        raise EncodingError(f"{path}: binary data; {BINARY}")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise EncodingError(f"{path}: not UTF-8 at byte {error.start}; convert it, or create it again") from None


def read_json(path: Path, cure: str = "") -> Any:
    """The content of a JSON file. Raises InputError, which names `cure`, if it is not JSON."""
    try:
        return orjson.loads(read_text(path))
    except (EncodingError, orjson.JSONDecodeError) as error:
        why = str(error).removeprefix(f"{path}: ").partition(";")[0]
        raise InputError(f"{path}: not valid JSON ({why}){cure and f'; {cure}'}") from None


def read_cells(path: Path) -> Iterator[list[str]]:
    """The header and the rows of a CSV file of numbers; nothing if it does not exist.

    Leaves out what a killed process or a power cut left: incomplete rows and other bytes.
    """
    *lines, _ = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    names = [line.decode(errors="replace").strip().split(",") for line in lines[:1]]
    yield from names
    for cells in (line.strip().split(b",") for line in lines[1:]):
        with suppress(ValueError):
            numbers = [float(cell or b"nan") for cell in cells]
            if len(numbers) == len(names[0]):
                yield [cell.decode() for cell in cells]


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of `read_cells` by column."""
    header, *rows = [*read_cells(path)] or [[]]
    return [dict(zip(header, row, strict=True)) for row in rows]
