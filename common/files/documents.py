"""Reads documents from JSON lines, and refuses documents that a step has dropped.

Each line of rejects is marked: `{"dropped_by": "clean", …, "reason": "short"}`. All readers of
documents raise InputError at a marked line, so rejects are never taken for a corpus.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import orjson

from common.console import warn
from common.errors import InputError
from common.files.reading import COMPRESSED, Frames, decompressed, located_blocks, read_blocks, read_lines
from common.files.writing import naming

Document = dict[str, Any]

MARK = "dropped_by"
"""Key of dropped documents alone; its value is the step that dropped them."""
_MARKED = f'{{"{MARK}":'.encode()

REMOVED_IDS = Path("takedown/ids.txt")
"""Below a run: ids that `workflow.provenance.remove` removed; no step reads them again."""

LONGEST_LINE = 60_000_000  # bytes; a step needs up to 30 times as much, and the rules ask for 2 GB
_BLOCK = 1 << 18  # bytes of a compressed file that `lines_at` reads at a time
_DEEPEST = 100  # levels; orjson writes 254, pickle fewer than 1,000
_FIRST_ROUNDED = 2.0**63  # orjson reads larger integers as floats if they do not fit in 64 bits


class BadLines:
    """Counts lines (or other `unit`s) that are not documents; `check` limits their share."""

    def __init__(self, max_share: float, unit: str = "line", cure: str = "repair the file", named: int = 1) -> None:
        self.max_share = max_share
        self.unit, self.cure, self.named = unit, cure, named
        self.lines = 0
        self.bad = 0
        self.first = ""
        """What is wrong with the first `named` of them."""

    def add(self, where: str) -> None:
        """Count one bad line, and warn of the first; `where` is `file:line: what is wrong`."""
        self.count(where)
        if self.bad <= 10:  # enough to see the pattern without flooding the log
            warn(f"bad {self.unit} skipped: {where}")

    def count(self, where: str) -> None:
        """Count one bad line."""
        self.bad += 1
        if self.bad <= self.named:
            self.first = f"{self.first}; {where}" if self.first else where

    def check(self) -> None:
        """Raise InputError if more than `max_share` of the lines are bad."""
        if self.bad > self.max_share * self.lines:
            raise InputError(
                f"{self.first}; {self.bad} of {self.lines} {self.unit}s are bad, more than max_bad_share "
                f"{self.max_share:g}: {self.cure} or raise max_bad_share"
            )


def holds_rejects(path: Path) -> bool | None:
    """Whether a regular file begins with a dropped document; None if empty or unreadable."""
    try:
        line = next(read_blocks(path, 1 << 14), b"").partition(b"\n")[0]
    except (InputError, OSError):
        return None
    return line.startswith(_MARKED) if line else None


def read_object(line: bytes, where: str, strings: Sequence[str], skip: Sequence[str] = ()) -> Document | str:
    """Parse a JSON object with strings under `strings`, without the keys in `skip`.

    Returns what is wrong if it cannot be written as it was read. NaN and infinity, which Python's
    json writes, become null. `where` is `file:line`. Raises InputError for a dropped document.
    """
    if len(line) > LONGEST_LINE:
        return f"longer than {LONGEST_LINE:,} bytes; split the document"
    try:
        document: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        plain = _without_constants(line)
        if plain is None:
            return _malformed(line, error)
        line, document = plain, orjson.loads(plain)
    if not isinstance(document, dict):
        return "not a JSON object"
    if MARK in document:
        raise InputError(
            f"{where}: dropped by the step {document[MARK]}: the file holds rejects; name the step's shards instead, "
            f'or remove "{MARK}" from its lines to read them'
        )
    for key in strings:
        if not isinstance(document.get(key), str):
            return f"no string under {key!r}"
    for key in set(skip).difference(strings):
        document.pop(key, None)
    return _unwritable(document, line) or document


def _malformed(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        near = line.decode()[max(0, error.pos - 20) : error.pos + 20]
    except UnicodeDecodeError as wrong:
        return f"not UTF-8 at byte {wrong.start + 1}; convert the file to UTF-8, or set encoding"
    return f"not JSON at column {error.colno}: {error.msg}, in {near!r}"


def _without_constants(line: bytes) -> bytes | None:
    """A line of JSON with null instead of NaN, Infinity and -Infinity; None if it is not JSON."""
    if b"NaN" not in line and b"Infinity" not in line:
        return None
    try:
        plain = json.dumps(json.loads(line, parse_constant=lambda name: None)).encode()
        orjson.loads(plain)
    except (ValueError, RecursionError):
        return None
    return plain


def _unwritable(value: Document, line: bytes) -> str:
    """Why a parsed object could not be written as it was read; empty if it can."""
    containers: list[Any] = [value]
    depth, has_large = 0, False
    while containers:
        depth += 1
        if depth > _DEEPEST:
            return f"nested more than {_DEEPEST} deep; flatten or remove that key"
        values = [inner for outer in containers for inner in (outer.values() if type(outer) is dict else outer)]
        # not isinstance: this sees every value of a corpus
        has_large = has_large or any(type(inner) is float and abs(inner) >= _FIRST_ROUNDED for inner in values)
        containers = [inner for inner in values if type(inner) in (dict, list)]
    integers: list[str] = []
    if has_large:  # a float that may have been an integer
        json.loads(line, parse_int=integers.append)
    if all(-(2**63) <= int(digits) < 2**64 for digits in integers):
        return ""
    return "an integer beyond 64 bits would be rounded; write it as a string"


def _located_lines(path: Path, frames: Frames | None, encoding: str = "utf-8") -> Iterator[tuple[int, bytes]]:
    for number, (position, block) in enumerate(
        located_blocks(path, longest=LONGEST_LINE, frames=frames, encoding=encoding)
    ):
        if number == 0 and block.strip() and b"\n{" not in b"\n" + block:
            raise InputError(f"{path}: not JSON lines, one object per line; python -m corpus.ingest reads texts")
        for line in block.removesuffix(b"\n").split(b"\n"):
            yield position, line.rstrip(b"\r")
            position += len(line) + 1


def read_json_lines(path: Path, encoding: str = "utf-8") -> Iterator[bytes]:
    """The lines of a file of JSON objects, truncated to just over LONGEST_LINE bytes.

    Raises InputError for a file whose first megabyte has no object.
    """
    return (line for _, line in _located_lines(path, None, encoding))


def read_documents(path: Path, bad: BadLines | None = None) -> Iterator[Document]:
    """The documents of one JSON-lines file, decompressed according to its suffix.

    A document is an object with strings under "text" and "id". Other lines are counted in `bad`, or
    raise InputError without it. A dropped document always raises.
    """
    return (document for _, _, document in located_documents(path, bad))


def located_documents(
    path: Path, bad: BadLines | None = None, frames: Frames | None = None
) -> Iterator[tuple[int, int, Document]]:
    """`read_documents` with (position, length) of each line of text, for `lines_at`.

    Fills `frames` while reading.
    """
    for number, (position, line) in enumerate(_located_lines(path, frames), start=1):
        if bad is not None:
            bad.lines += 1
        where = f"{path}:{number}"
        document = read_object(line, where, ("text", "id"))
        if not isinstance(document, str):
            yield position, len(line), document
        elif bad is None:
            raise InputError(f"{where}: {document}")
        else:
            bad.add(f"{where}: {document}")


def lines_at(path: Path, frames: Frames, lines: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """The lines at (position, length), in order of position, both from `located_documents`.

    Decompresses only the frames that hold them. Raises InputError for a damaged or shorter file.
    """
    text: Iterator[bytes] = iter(())
    start, held = 0, b""  # the block of text that was read last, and where it starts
    with path.open("rb") as file, naming(path):
        for position, length in lines:
            if path.suffix not in COMPRESSED:
                file.seek(position)
                start, held = position, file.read(length)
            elif (index := bisect_right(frames, position, key=itemgetter(1)) - 1) >= 0 and (
                not held or frames[index][1] > start + len(held)
            ):
                text = decompressed(_blocks(file, frames, index), path)
                start, held = frames[index][1], b""
            while start + len(held) < position + length:
                skipped = min(max(position - start, 0), len(held))
                if (more := next(text, None)) is None:
                    raise InputError(f"{path}: shorter than when it was read first; run the steps after it again")
                start, held = start + skipped, held[skipped:] + more
            yield held[position - start : position - start + length]


def _blocks(file: IO[bytes], frames: Frames, index: int) -> Iterator[bytes]:
    """The bytes of a file from the frame `index` on; a block never spans two frames."""
    file.seek(frames[index][0])
    for following in range(index + 1, len(frames) + 1):
        left = frames[following][0] - frames[following - 1][0] if following < len(frames) else None
        while data := file.read(_BLOCK if left is None else min(_BLOCK, left)):
            left = left and left - len(data)
            yield data


def read_shards(paths: Iterable[Path], bad: BadLines | None = None) -> Iterator[Document]:
    """`read_documents` of several files."""
    return chain.from_iterable(read_documents(path, bad) for path in paths)


def removed_ids(paths: Iterable[Path]) -> frozenset[str]:
    """The ids in files like REMOVED_IDS, one per line; a missing file has none."""
    return frozenset(line.decode() for path in paths if path.is_file() for line in read_lines(path))


def short_hash(text: str) -> str:
    """First 16 hex digits of sha256: a document's `id`, from its canonical URL or else its text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
