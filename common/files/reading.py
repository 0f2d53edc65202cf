"""Reads text files as lines, blocks and rows: decompresses by suffix, skips a byte-order mark, reports damage.

Regular files, pipes (`<(zcat …)`) and `-` (stdin) are all read once, in order.
"""

import bz2
import codecs
import lzma
import re
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
from common.files.writing import naming

_CHUNK = 1 << 20  # bytes of text read at a time, and four times the compressed ones
_HEAD = 1 << 13  # bytes by which a format is recognised; they may be compressed
_MARK = b"\xef\xbb\xbf"  # UTF-8's byte-order mark
_BLANK = _MARK + b" \t\r\n\f"

_NEW_FRAME: dict[str, Callable[[], Any]] = {
    ".gz": partial(zlib.decompressobj, 31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": partial(lzma.LZMADecompressor, lzma.FORMAT_XZ),  # with FORMAT_AUTO, zeros would be an empty .lzma file
    # 2**31: Pushshift dumps use long windows
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(),
}
"""By suffix, a decompressor of one gzip member, zstd frame, bzip2 or xz stream; all have the same three members."""
_PADDED = (".gz", ".xz")
COMPRESSED = tuple(_NEW_FRAME)
"""Suffixes of compressed files that can be read."""
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"\xfd7zXZ\0": ".xz", b"BZh": ".bz2"}
_DATA = rb"[\0-\x07\x0e-\x1a\x1c-\x1f]"  # MIME Sniffing's "binary data bytes" but backspace and line tabulation
_HEADED = rb"(?=(?s:.){0,28}" + _DATA + rb")"  # after letters with which a text may begin
_UTF16 = ("UTF-16 text", "convert it to UTF-8, or give a source the encoding utf-16")
_UNPACK, _LEAVE, _CONVERT = "unpack it, and name its files", "leave it out", "convert it to Parquet"
_TABLE = "python -m corpus.ingest reads it"
_KINDS = {
    rb"\xff\xfe|\xfe\xff": _UTF16,
    rb"WARC/": ("WARC", "python -m corpus.scrape --warc extracts its pages"),
    rb"filedesc://": ("ARC", "warcio recompress makes it WARC"),
    rb"%PDF-": ("PDF", "extract its text first, with pdftotext"),
    rb"PAR1" + _HEADED: ("Parquet", _TABLE),
    rb"ARROW1\0|\xff\xff\xff\xff": ("Arrow", _TABLE),  # the second: a stream, the mark before each message
    rb"PK(\x03\x04|\x05\x06|\x07\x08)": ("a zip archive", _UNPACK),
    rb"7z\xbc\xaf": ("a 7z archive", _UNPACK),
    rb"Rar!\x1a": ("a RAR archive", _UNPACK),
    rb"\x1f\x9d|LZIP\x01|MSCF\0|\xed\xab\xee\xdb": ("an archive", _UNPACK),
    rb"\x04\x22\x4d\x18": ("LZ4-compressed", "decompress it"),
    rb"\x89PNG|\xff\xd8\xff|II\*\0|MM\0\*|\0\0\x01\0|(GIF8|BM|8BPS)" + _HEADED: ("an image", _LEAVE),
    rb"\xff[\xfb\xfa\xf3\xf2]|\x1a\x45\xdf\xa3|\0{3}(?s:.)ftyp|(RIFF|FORM|ID3|OggS|fLaC|MThd|FLV|[CF]WS)" + _HEADED: (
        "audio or video", _LEAVE),
    rb"\x7fELF|\0asm|\xca\xfe\xba\xbe|\xfe\xed\xfa[\xce\xcf]|[\xce\xcf]\xfa\xed\xfe|(MZ|dex\n)" + _HEADED: (
        "a program", _LEAVE),
    rb"\0\x01\0\0\0|(wOF[F2]|OTTO)" + _HEADED: ("a font", _LEAVE),
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("an Office document", "extract its text first"),
    rb"SQLite format 3\0": ("an SQLite database", "export a table as CSV"),
    rb"ORC" + _HEADED: ("ORC", _CONVERT),
    rb"Obj\x01": ("Avro", _CONVERT),
    rb"FEA1" + _HEADED: ("Feather of version 1", _CONVERT),
    rb"\x93NUMPY": ("a NumPy array", "give the text that it was made from"),
    rb"\x89HDF": ("HDF5", _CONVERT),
    rb"version https://git-lfs": ("a pointer of Git LFS", "get the file itself with git lfs pull"),
} | {re.escape(magic): (f"{suffix}-compressed", f"decompress it, or end its name in {suffix}")
     for magic, suffix in _MAGIC.items()}  # fmt: skip
"""THE table of first bytes: how a file or page begins, what it is, and the cure for a file."""
_TAR = slice(257, 262)  # where a tar archive has b"ustar"


def kind_of(head: bytes) -> tuple[str, str]:
    """The format that begins with `head`, perhaps after white space, and the cure; both are empty for text."""
    if head[_TAR] == b"ustar":
        return "a tar archive", _UNPACK
    head = head[:_HEAD].lstrip(_BLANK)
    return next((kind for pattern, kind in _KINDS.items() if re.match(pattern, head)), ("", ""))


def is_binary(head: bytes) -> bool:
    """Whether `head` begins a binary format."""
    return kind_of(head)[0] not in ("", "WARC", "ARC", _UTF16[0])


def is_torn(data: bytes, begin: bytes) -> bool:
    """Whether a power cut can leave `data`, without a complete record, of a file of ours that begins with `begin`.

    It leaves nothing, or a part, and after that zeros, noise or the beginning again. A text, or another format that
    `kind_of` knows, is somebody's file.
    """
    data = data.rstrip(b"\0")
    same = next(length for length in range(len(begin), -1, -1) if data.startswith(begin[:length]))
    rest = data[same:]
    if same == len(begin) or begin.startswith(rest) or rest.startswith(begin):
        return True
    return re.search(_DATA, rest) is not None and not kind_of(data)[0]


def _is_noise(text: bytes) -> bool:
    """Whether over 2 % of its beginning are control characters: random bytes have 10 %, a text in UTF-8 none."""
    head = text[:_HEAD]
    return len(re.findall(_DATA, head)) > 2 + len(head) // 50


def read_head(path: Path) -> tuple[str, bytes]:
    """The compression of a regular file, as a suffix or "", and the beginning of its content."""
    with open(path, "rb") as file, naming(path):
        head = file.read(_HEAD)
        packed = next((suffix for magic, suffix in _MAGIC.items() if head.startswith(magic)), "")
        if packed:
            frame, found = _NEW_FRAME[packed](), b""
            with suppress(zstandard.ZstdError, zlib.error, lzma.LZMAError, OSError, EOFError):
                while head and not found:
                    found, head = frame.decompress(head), file.read(_HEAD)
            head = found
    return packed, head


Frames = list[tuple[int, int]]
"""Of each frame of a compressed file: where it begins in the file, and where its text begins in the whole text."""


def decompressed(blocks: Iterator[bytes], path: Path, frames: Frames | None = None) -> Iterator[bytes]:
    """The decompressed bytes of a file of one or more frames; fills `frames` while reading.

    Zeros after a gzip member (tapes pad with them) or an xz stream (the format's padding) are skipped, as gzip and xz
    do. Raises InputError for a truncated frame, other bytes between or after frames, and an empty file.
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
    """Decode chunks of another encoding to UTF-8. Raises EncodingError where they are invalid."""
    try:
        yield from (text.encode() for text in codecs.iterdecode(chunks, encoding))
    except UnicodeError as error:
        reason = getattr(error, "reason", error)  # UTF-16 without its byte-order mark has none
        raise EncodingError(f"{path}: not {encoding} ({reason}); give its encoding, or create it again") from None


def _texts(chunks: Iterator[bytes], encoding: str, path: Path) -> Iterator[bytes]:
    """The chunks of a text as UTF-8. Raises EncodingError for another encoding or format."""
    texts = chunks if encoding == "utf-8" else _as_utf8(chunks, encoding, path)
    head = b""
    for chunk in texts:
        head += chunk
        if len(head) >= len(_MARK):  # a frame may be shorter than a byte-order mark
            break
    kind, cure = kind_of(head)
    if not kind and encoding != "utf-8" and _is_noise(head):  # of UTF-8 no random bytes are valid
        kind, cure = "binary data", _LEAVE
    if kind:
        raise EncodingError(f"{path}: {kind}; {cure}")
    yield head
    yield from texts


def is_readable(path: Path) -> bool:
    """Whether a path can be read like a file: a regular file, a pipe, a terminal, /dev/null or stdin."""
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
        if read == 0 and chunk.startswith(_MARK):
            chunk, start, read = chunk[len(_MARK) :], len(_MARK), len(_MARK)
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
    """Blocks of complete lines, about `size` bytes (default 1 MB) each, decompressed by suffix, as UTF-8. `-` is stdin.

    A line of more than `longest` bytes is cut, but stays longer than that. Raises InputError if the file is missing,
    truncated, damaged, or compressed and empty; EncodingError for another encoding or format.
    """
    return (block for _, block in located_blocks(path, size, longest, encoding=encoding))


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without line ends; errors as in `read_blocks`."""
    return (line.rstrip(b"\r") for block in read_blocks(path) for line in block.removesuffix(b"\n").split(b"\n"))


def read_text(path: Path, longest: int | None = None, encoding: str = "utf-8") -> str:
    """A whole text file with its line ends. Errors as in `read_blocks`.

    Raises EncodingError if it has another encoding, is binary data, or has more than `longest` bytes.
    """
    blocks, size = [], 0
    for block in read_blocks(path, longest=longest, encoding=encoding):
        blocks.append(block)
        size += len(block)
        if longest is not None and size > longest:
            raise EncodingError(f"{path}: longer than {longest:,} bytes; split it into documents")
    text = b"".join(blocks)
    if _is_noise(text):
        raise EncodingError(f"{path}: binary data; {_LEAVE}")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise EncodingError(f"{path}: not UTF-8 at byte {error.start}; convert it, or create it again") from None


def read_json(path: Path, cure: str = "") -> Any:
    """The content of a JSON file. Raises InputError if it is missing or not JSON: then the message ends with `cure`."""
    try:
        return orjson.loads(read_text(path))
    except (EncodingError, orjson.JSONDecodeError) as error:
        why = str(error).removeprefix(f"{path}: ").partition(";")[0]
        raise InputError(f"{path}: not valid JSON ({why}){cure and f'; {cure}'}") from None


def read_cells(path: Path) -> Iterator[list[str]]:
    """The header of a CSV file of numbers that is appended to, and its rows; nothing if it does not exist.

    A row that a killed process or a power cut left incomplete is left out, as are whatever bytes lie around it.
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
