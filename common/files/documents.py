"""Reads documents from JSON lines, and refuses documents that a step has dropped.

Every line in a file of rejects is marked: `{"dropped_by": "clean", …, "reason": "short"}`. All readers of documents
raise InputError at the first marked line, so rejects are never taken for a corpus.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
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
"""Key that only dropped documents have; its value is the step that dropped them."""
_MARKED = f'{{"{MARK}":'.encode()

REMOVED_IDS = Path("takedown/ids.txt")
"""Below a run: the ids of documents that `workflow.provenance.remove` has removed; no step takes them in again."""

LONGEST_LINE = 60_000_000  # bytes; a step takes up to 30 times as much for a document, and the rules ask for 2 GB
_BLOCK = 1 << 18  # bytes of a compressed file that `lines_at` reads at a time
_DEEPEST = 100  # levels; orjson writes 254, pickle fewer than 1,000
_FIRST_ROUNDED = 2.0**63  # orjson reads larger integers as floats if they do not fit in 64 bits


class BadLines:
    """Counts lines that are not documents, or other `unit`s; `check` raises if their share is too large."""

    def __init__(self, max_share: float, unit: str = "line", cure: str = "repair the file", named: int = 1) -> None:
        self.max_share = max_share
        self.unit, self.cure, self.named = unit, cure, named
        self.lines = 0
        self.bad = 0
        self.first = ""
        """What is wrong with the first `named` of them."""

    def add(self, where: str) -> None:
        """Count one bad line; `where` is `file:line: what is wrong`."""
        self.bad += 1
        if self.bad <= self.named:
            self.first = f"{self.first}; {where}" if self.first else where
        if self.bad <= 10:  # enough to see the pattern without flooding the log
            warn(f"bad {self.unit} skipped: {where}")

    def check(self) -> None:
        """Raise InputError if more than `max_share` of the lines are bad."""
        if self.bad > self.max_share * self.lines:
            raise InputError(
                f"{self.first}; {self.bad} of {self.lines} {self.unit}s are bad, more than max_bad_share "
                f"{self.max_share:g}: {self.cure} or raise max_bad_share"
            )


def holds_rejects(path: Path) -> bool | None:
    """Whether a regular file begins with a dropped document; None if it is empty or cannot be read."""
    try:
        line = next(read_blocks(path, 1 << 14), b"").partition(b"\n")[0]
    except (InputError, OSError):
        return None
    return line.startswith(_MARKED) if line else None


def read_object(line: bytes, where: str, strings: Sequence[str], skip: Sequence[str] = ()) -> Document | str:
    """Parse a JSON object with strings under `strings`, without the keys in `skip`; or return what is wrong.

    Every value can be written as it was read; NaN and infinity, which Python's json writes, are null, as in Parquet.
    `where` is `file:line`. Raises InputError for a dropped document.
    """
    if len(line) > LONGEST_LINE:
        return f"longer than {LONGEST_LINE:,} bytes; split the document"
    try:
        found: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        plain = _without_constants(line)
        if plain is None:
            return _malformed(line, error)
        line, found = plain, orjson.loads(plain)
    if not isinstance(found, dict):
        return "not a JSON object"
    if MARK in found:
        raise InputError(
            f"{where}: dropped by the step {found[MARK]}: the file holds rejects; name the step's shards instead, or "
            f'remove "{MARK}" from its lines to read them'
        )
    for key in strings:
        if not isinstance(found.get(key), str):
            return f"no string under {key!r}"
    document: Document = {key: found[key] for key in found if key in strings or key not in skip} if skip else found
    return _unwritable(document, line) or document


def _malformed(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        near = line.decode()[max(0, error.pos - 20) : error.pos + 20]
    except UnicodeDecodeError as wrong:
        return f"not UTF-8 at byte {wrong.start + 1}; convert the file to UTF-8, or set encoding"
    return f"not JSON at column {error.colno}: {error.msg}, in {near!r}"


def _without_constants(line: bytes) -> bytes | None:
    """The JSON of a line that has NaN, Infinity or -Infinity as values, with null instead; None if it is not JSON."""
    if b"NaN" not in line and b"Infinity" not in line:
        return None
    try:
        plain = json.dumps(json.loads(line, parse_constant=lambda name: None)).encode()
        orjson.loads(plain)
    except (ValueError, RecursionError):
        return None
    return plain


def _unwritable(value: Document, line: bytes) -> str:
    """Why a parsed object could not be written as it was read; empty if it can. Walks all values once, by level."""
    level: list[Any] = [value]
    depth, has_large = 0, False
    while level:
        depth += 1
        if depth > _DEEPEST:
            return f"nested more than {_DEEPEST} deep; flatten or remove that key"
        inner = [one for outer in level for one in (outer.values() if type(outer) is dict else outer)]
        # not isinstance: this sees every value of a corpus
        has_large = has_large or any(type(one) is float and abs(one) >= _FIRST_ROUNDED for one in inner)
        level = [one for one in inner if type(one) in (dict, list)]
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
    """The lines of a file of JSON objects; longer ones are truncated to just over LONGEST_LINE bytes.

    Raises InputError for a file that begins with a megabyte of something else.
    """
    return (line for _, line in _located_lines(path, None, encoding))


def read_documents(path: Path, bad: BadLines | None = None) -> Iterator[Document]:
    """The documents of one JSON-lines file, decompressed according to its suffix.

    A document is an object with a string under "text" and one under "id". Other lines are counted in `bad`; without it,
    the first one raises InputError with file and line. A dropped document always raises.
    """
    return (document for _, _, document in located_documents(path, bad))


def located_documents(
    path: Path, bad: BadLines | None = None, frames: Frames | None = None
) -> Iterator[tuple[int, int, Document]]:
    """`read_documents` with (position, length) of each line, in bytes of the decompressed file, for `lines_at`.

    `frames` is filled with the frames of a compressed file, and is complete after the last document.
    """
    for number, (position, line) in enumerate(_located_lines(path, frames), start=1):
        if bad is not None:
            bad.lines += 1
        where = f"{path}:{number}"
        found = read_object(line, where, ("text", "id"))
        if not isinstance(found, str):
            yield position, len(line), found
        elif bad is None:
            raise InputError(f"{where}: {found}")
        else:
            bad.add(f"{where}: {found}")


def lines_at(path: Path, frames: Frames, lines: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """The lines with some (position, length), ordered by position; `located_documents` gives both and `frames`.

    Reads the frames that hold them, so a file of one frame up to the last of them; any file that is not compressed is
    read only there. Raises InputError for a file that is damaged, or shorter than that.
    """
    text: Iterator[bytes] = iter(())
    start, held = 0, b""  # text from `start` on, the last that has been read
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
    """The bytes of the frames from one on, in blocks that end with a frame."""
    file.seek(frames[index][0])
    for following in range(index + 1, len(frames) + 1):
        left = frames[following][0] - frames[following - 1][0] if following < len(frames) else None
        while data := file.read(_BLOCK if left is None else min(_BLOCK, left)):
            left = left and left - len(data)
            yield data


def read_shards(paths: Iterable[Path], bad: BadLines | None = None) -> Iterator[Document]:
    """The documents of several files, in order; see `read_documents`."""
    for path in paths:
        yield from read_documents(path, bad)


def removed_ids(paths: Iterable[Path]) -> frozenset[str]:
    """The ids in files like REMOVED_IDS, one per line; a file that does not exist has none."""
    return frozenset(line.decode() for path in paths if path.is_file() for line in read_lines(path))


def short_hash(text: str) -> str:
    """First 16 hex digits of sha256: the `id` of a document, from its canonical URL or else its text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
