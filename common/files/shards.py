"""Names and writers of shards: one JSON document per line, compressed if the name ends in `.zst`.

A compressed shard is a sequence of zstd frames, each of complete lines, so that `lines_at` reads one document without
the rest. Where a frame ends depends on the lines alone.
"""

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import orjson
import zstandard

from common.errors import InputError
from common.files.documents import MARK, Document
from common.files.writing import output_files
from common.workers import threaded_map

MAX_SHARDS = 100_000  # ten times what has been tried: a mistyped number would make files for hours
FRAME = 128 << 10
"""Bytes of text that end a frame; 0.1 ms decompress it."""
_LEVEL = 6  # makes frames of 128 KB as small as level 3 makes a whole shard
_LINE = orjson.OPT_APPEND_NEWLINE
_HELD = 64 << 20  # bytes of lines that a writer of shards holds

Write = Callable[[Document], object]


def shard_name(shard: int) -> str:
    """`0003`, the first part of every file name of shard 3."""
    return f"{shard:04d}"


def shard_stem(path: Path) -> str:
    """`0003` of `0003.jsonl.zst`, the stem of all outputs for this shard."""
    return path.name.split(".jsonl")[0]


def require_distinct_stems(shards: Sequence[Path]) -> None:
    """Raise InputError if two shards would write the same output."""
    stem, count = Counter(map(shard_stem, shards)).most_common(1)[0]
    if count > 1:
        raise InputError(f"{stem}.jsonl.zst: two inputs have this file name; rename one of them")


def shard_paths(folder: Path, shards: int, suffix: str) -> list[Path]:
    """`folder/0000SUFFIX`, `folder/0001SUFFIX`, …: one path per shard. Raises InputError for too many."""
    if shards > MAX_SHARDS:
        raise InputError(f"{folder}: {shards:,} shards; choose at most {MAX_SHARDS:,}")
    return [folder / f"{shard_name(shard)}{suffix}" for shard in range(shards)]


@contextmanager
def _lines_to(file: IO[bytes], suffix: str) -> Iterator[Callable[[bytes], object]]:
    """Yield a function that appends a line; with `.zst` as frames, whose bytes depend only on the lines."""
    if suffix != ".zst":
        yield file.write
        return
    lines: list[bytes] = []
    held = frames = 0

    def end_frame() -> None:
        nonlocal held, frames
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)  # one thread: always the same bytes
        file.write(compressor.compress(b"".join(lines)))
        lines.clear()
        held, frames = 0, frames + 1

    def write(line: bytes) -> None:
        nonlocal held
        lines.append(line)
        held += len(line)
        if held >= FRAME:
            end_frame()

    yield write
    if held or not frames:
        end_frame()


@contextmanager
def line_writer(path: Path | None) -> Iterator[Callable[[bytes], object]]:
    """Yield a function that appends a line, with its end, to `path`, which appears complete or not at all.

    A path that ends in `.zst` is compressed. The bytes depend only on the lines. Without a path, nothing is written.
    """
    if path is None:
        yield lambda line: None
        return
    with output_files([path]) as (output,), output.open() as file, _lines_to(file, path.suffix) as write:
        yield write


@contextmanager
def document_writer(path: Path | None, dropped_by: str = "") -> Iterator[Write]:
    """`line_writer` for documents.

    Rejects are marked with the step that has dropped them, so that no reader takes them for documents.
    """
    if path is None:
        yield lambda document: None
        return
    mark = {MARK: dropped_by} if dropped_by else {}
    with line_writer(path) as write:
        yield lambda document: write(orjson.dumps(mark | document if mark else document, option=_LINE))


@contextmanager
def sharded_writer(paths: Sequence[Path], threads: int = 1) -> Iterator[Callable[[int, Document], None]]:
    """Yield a function that appends a document to the shard of a number; all `paths` appear, or none.

    Holds 64 MB of lines, and opens one file at a time: a process may not open a thousand. Each time 64 MB are full,
    every shard gets frames, compressed by `threads` threads. The bytes depend on the documents and their order alone.
    """
    pending: list[list[bytes]] = [[] for _ in paths]
    held = 0
    with output_files(paths) as outputs:

        def packed(shard: int) -> bytes:
            data = io.BytesIO()
            with _lines_to(data, paths[shard].suffix) as append:
                for line in pending[shard]:
                    append(line)
            pending[shard].clear()
            return data.getvalue()

        def flush() -> None:
            for output, data in zip(
                outputs, threaded_map(packed, range(len(paths)), threads if threads > 1 else 0), strict=True
            ):
                output.append(data)

        def write(shard: int, document: Document) -> None:
            nonlocal held
            line = bytes(memoryview(orjson.dumps(document, option=_LINE)))  # orjson's own has 1 KB and more to spare
            pending[shard].append(line)
            held += len(line)
            if held >= _HELD:
                flush()
                held = 0

        yield write
        flush()
