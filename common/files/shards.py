"""Names and writers of shards: one JSON document per line, compressed if the name ends in `.zst`.

A compressed shard is a sequence of zstd frames, each of whole lines, so `lines_at` reads one
document without the rest. Where a frame ends depends on the lines alone.
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

MAX_SHARDS = 100_000  # ten times what has been tried: a typo would make files for hours
FRAME = 128 << 10  # bytes of text that end a frame; decompressed in 0.1 ms
_LEVEL = 6  # makes frames of 128 KB as small as level 3 makes a whole shard
_LINE = orjson.OPT_APPEND_NEWLINE
_HELD = 64 << 20  # bytes of lines that `sharded_lines` holds

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
    """`folder/0000SUFFIX`, `folder/0001SUFFIX`, … Raises InputError for too many."""
    if shards > MAX_SHARDS:
        raise InputError(f"{folder}: {shards:,} shards; choose at most {MAX_SHARDS:,}")
    return [folder / f"{shard_name(shard)}{suffix}" for shard in range(shards)]


@contextmanager
def _lines_to(file: IO[bytes], suffix: str) -> Iterator[Callable[[bytes], object]]:
    """Yield a function that appends a line; with `.zst` as frames."""
    if suffix != ".zst":
        yield file.write
        return
    lines: list[bytes] = []
    held = frames = 0

    def end_frame() -> None:
        nonlocal held, frames
        # one thread: always the same bytes
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
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
    """Yield a function that appends a line, with its end, to `path`; does nothing without a path.

    The file appears complete or not at all, and is compressed if its name ends in `.zst`.
    """
    if path is None:
        yield lambda line: None
        return
    with output_files([path]) as (output,), output.open() as file, _lines_to(file, path.suffix) as write:
        yield write


@contextmanager
def document_writer(path: Path | None, dropped_by: str = "") -> Iterator[Write]:
    """`line_writer` for documents. `dropped_by` marks rejects with the step that dropped them."""
    mark = {MARK: dropped_by} if dropped_by else {}
    with line_writer(path) as write:
        yield lambda document: write(orjson.dumps(mark | document, option=_LINE))


@contextmanager
def sharded_lines(paths: Sequence[Path], threads: int = 1) -> Iterator[Callable[[int, bytes], object]]:
    """Yield a function that appends lines to the shard of a number; all `paths` appear, or none.

    Holds 64 MB, and opens one file at a time: a process may not open a thousand. When 64 MB are
    full, `threads` threads compress a frame or more per shard. The bytes depend on the lines alone.
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

        def write(shard: int, line: bytes) -> None:
            nonlocal held
            pending[shard].append(line)
            held += len(line)
            if held >= _HELD:
                flush()
                held = 0

        yield write
        flush()


@contextmanager
def sharded_writer(paths: Sequence[Path], threads: int = 1) -> Iterator[Callable[[int, Document], object]]:
    """`sharded_lines` for documents."""
    with sharded_lines(paths, threads) as write:
        # the copy is small: orjson's own bytes have 1 KB and more to spare
        yield lambda shard, document: write(shard, bytes(memoryview(orjson.dumps(document, option=_LINE))))
