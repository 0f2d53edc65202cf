"""Files as every step reads and writes them: compressed text, JSON-lines shards, all-or-nothing writes.

A shard is `*.jsonl.zst`, one document a line: `{"id", "url", "text", …}`. A file under its final name is always
whole: writers fill `<name>.tmp`, fsync it, rename it, and remove it when anything goes wrong.
"""

import bz2
import csv
import fcntl
import glob
import gzip
import hashlib
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any

import orjson
import zstandard

from common.errors import InputError

Document = dict[str, Any]

_CHUNK = 1 << 20  # bytes read at a time
_HELD = 64 << 20  # bytes of lines that a writer of shards holds


# ------------------------------------------------------------------------------------------------ writing


def lock(file: IO[bytes], refusal: str) -> None:
    """Hold an open file for this process until it is closed; InputError with `refusal` when another one holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(refusal) from None
    except OSError:
        pass  # a file system without locks


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield `<path>.tmp`; on success fsync it and rename it to `path`, on any error remove it.

    Raises InputError when another process is writing the same file (an orphan of a killed run, say).
    """
    with atomic_paths([path]) as (temporary,):
        yield temporary


@contextmanager
def atomic_paths(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """`atomic_path` for any number of files; only the first one is held open, and guards the others."""
    temporaries = [path.with_name(path.name + ".tmp") for path in paths]
    folders = dict.fromkeys(path.parent for path in paths)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    with open(temporaries[0], "ab") as file:
        lock(file, f"{temporaries[0]}: another process is writing it; stop that one, or wait for it")
        try:
            for temporary in temporaries:
                temporary.write_bytes(b"")  # what a killed run left
            yield temporaries
            for temporary in temporaries:
                fsync(temporary)
            for temporary, path in zip(temporaries, paths, strict=True):
                temporary.replace(path)
            for folder in folders:
                fsync(folder)
        except BaseException:
            for temporary in temporaries:
                temporary.unlink(missing_ok=True)
            raise


def fsync(path: Path) -> None:
    """Wait until the disk has a file, or the renames inside a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small text file, all or nothing."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON with a trailing newline, all or nothing."""
    write_text(path, orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; InputError names it when it is absent or not JSON."""
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None


@contextmanager
def document_writer(path: Path) -> Iterator[Callable[[Document], None]]:
    """Yield a function that appends one JSON object as a line of `path`, which appears whole or not at all.

    A path that ends in `.zst` is compressed. The bytes are a function of the objects alone: one zstd frame, fixed
    level, one thread.
    """
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        with compressor.stream_writer(file) if path.suffix == ".zst" else nullcontext(file) as lines:
            yield lambda document: _write_line(lines, document)


def _write_line(file: Any, document: Document) -> None:
    file.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))


@contextmanager
def sharded_writer(paths: Sequence[Path]) -> Iterator[Callable[[int, Document], None]]:
    """Yield a function that appends a document to the shard of a number; all `paths` appear, or none.

    Holds 64 MB of lines, and one file open: a thousand shards are more than a process may have. Each time they are full
    every shard gets a zstd frame: the bytes are a function of the documents and their order alone.
    """
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
    pending: list[list[bytes]] = [[] for _ in paths]
    held = 0
    with atomic_paths(paths) as temporaries:

        def flush() -> None:
            for path, temporary, lines in zip(paths, temporaries, pending, strict=True):
                with temporary.open("ab") as file:
                    file.write(compressor.compress(b"".join(lines)) if path.suffix == ".zst" else b"".join(lines))
                lines.clear()

        def write(shard: int, document: Document) -> None:
            nonlocal held
            line = orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)
            pending[shard].append(line)
            held += len(line)
            if held >= _HELD:
                flush()
                held = 0

        yield write
        flush()


@contextmanager
def optional_writer(path: Path | None) -> Iterator[Callable[[Document], None]]:
    """`document_writer`, or a function that drops everything where there is no path."""
    if path is None:
        yield lambda document: None
    else:
        with document_writer(path) as write:
            yield write


# ------------------------------------------------------------------------------------------------ reading


def _zstd_chunks(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Decompress every frame of a zstd file; a frame that stops early is an error (the library is silent)."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)  # 2**31: Pushshift dumps use long windows
    frame = decompressor.decompressobj()
    started = False
    while data := file.read(_CHUNK):
        while data:
            try:
                chunk = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise InputError(f"{path}: damaged zstd file ({error}); make it again") from None
            started = True
            if chunk:
                yield chunk
            data = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame, started = decompressor.decompressobj(), False
    if started:
        raise InputError(f"{path}: truncated zstd file; make it again")


def _chunks(path: Path) -> Iterator[bytes]:
    """The decompressed bytes of a plain, .gz, .bz2, .xz or .zst file, a chunk at a time."""
    suffix = path.suffix
    with open(path, "rb") as raw:
        if suffix == ".zst":
            yield from _zstd_chunks(raw, path)
            return
        openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        file = openers[suffix](raw, "rb") if suffix in openers else raw
        try:
            while data := file.read(_CHUNK):
                yield data
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{path}: truncated or damaged {suffix} file ({error}); make it again") from None
        except OSError as error:
            if error.errno is None:  # bz2 reports damage as a bare OSError
                raise InputError(f"{path}: truncated or damaged {suffix} file ({error}); make it again") from None
            raise


def read_blocks(path: Path) -> Iterator[bytes]:
    """Whole lines of a file, about a megabyte at a time, decompressed by its suffix. `-` is stdin.

    Raises InputError when the file is absent, truncated or damaged.
    """
    if str(path) != "-" and not path.is_file():
        raise InputError(f"{path}: no such file" if not path.exists() else f"{path}: not a file")
    chunks = _chunks(path) if str(path) != "-" else iter(partial(sys.stdin.buffer.read, _CHUNK), b"")
    rest: list[bytes] = []  # pieces of a line that spans chunks
    for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if end:
            yield b"".join([*rest, chunk[:end]])
            rest.clear()
        rest.append(chunk[end:])
    if last := b"".join(rest):
        yield last


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without their line ends; see `read_blocks`."""
    for block in read_blocks(path):
        for line in block.removesuffix(b"\n").split(b"\n"):
            yield line.rstrip(b"\r")


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file that grows by lines; none where it is absent. A torn last row is left out."""
    if not path.is_file():
        return []
    whole_lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    return list(csv.DictReader(whole_lines))


class BadLines:
    """Counts lines that are no documents; `check` fails when their share is larger than allowed."""

    def __init__(self, max_share: float) -> None:
        self.max_share = max_share
        self.lines = 0
        self.bad = 0
        self.first = ""

    def add(self, where: str) -> None:
        """Count one bad line; `where` is `file:line: what is wrong`."""
        self.bad += 1
        self.first = self.first or where
        if self.bad <= 10:  # enough to see the pattern, without a log of millions
            print(f"warning: bad line skipped: {where}", file=sys.stderr)

    def check(self) -> None:
        """Raise InputError when more than `max_share` of the lines were bad."""
        if self.bad > self.max_share * self.lines:
            raise InputError(
                f"{self.first}; {self.bad} of {self.lines} lines are bad, more than max_bad_share "
                f"{self.max_share:g}: mend the file or raise max_bad_share"
            )


def read_documents(path: Path, bad: BadLines | None = None) -> Iterator[Document]:
    """The documents of one JSON-lines file, decompressed by its suffix.

    A document is an object with a string under "text" and a string under "id". Lines that are not are counted in
    `bad`; without it the first one raises InputError with its file and line.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if bad is not None:
            bad.lines += 1
        problem = ""
        document: Any = None
        try:
            document = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            problem = f"not JSON ({error})"
        else:
            if not isinstance(document, dict):
                problem = "not a JSON object"
            else:
                for key in ("id", "text"):
                    if not isinstance(document.get(key), str):
                        problem = f"no string under {key!r}"
        if not problem:
            yield document
        elif bad is None:
            raise InputError(f"{path}:{number}: {problem}")
        else:
            bad.add(f"{path}:{number}: {problem}")


def read_shards(paths: Iterable[Path], bad: BadLines | None = None) -> Iterator[Document]:
    """The documents of several files, one file after the other; see `read_documents`."""
    for path in paths:
        yield from read_documents(path, bad)


def expand_inputs(patterns: Iterable[str]) -> list[Path]:
    """Files named by paths, folders (every file below, sorted) and globs (sorted); `-` is stdin.

    Raises InputError for a pattern that matches nothing: an input is never silently empty.
    """
    paths: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if pattern == "-" or path.is_file():
            paths.append(path)
            continue
        found = (
            (Path(folder) / name for folder, _, names in os.walk(path) for name in names if not name.startswith("."))
            if path.is_dir()
            else (Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file())
        )
        files = sorted(found)
        if not files:
            raise InputError(f"{pattern}: " + ("folder with no files" if path.is_dir() else "matches no file"))
        paths.extend(files)
    return paths


def short_hash(text: str) -> str:
    """First 16 hex digits of sha256: the `id` of a canonical URL, or of a text that has none."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
