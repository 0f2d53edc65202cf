"""Reads documents from JSON lines, and refuses documents that a step has dropped.

Every line in a file of rejects is marked: `{"dropped_by": "clean", …, "reason": "short"}`. All readers of documents
raise InputError at the first marked line, so rejects are never taken for a corpus.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from common.console import warn
from common.errors import InputError
from common.files.reading import Frames, located_blocks, read_blocks, read_lines

Document = dict[str, Any]

MARK = "dropped_by"
"""Key that only dropped documents have; its value is the step that dropped them."""
_MARKED = f'"{MARK}":'.encode()

REMOVED_IDS = Path("takedown/ids.txt")
"""Below a run: the ids of documents that `workflow.provenance.remove` has removed; no step takes them in again."""

LONGEST_LINE = 60_000_000  # bytes; a step takes up to 30 times as much for a document, and the rules ask for 2 GB
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


def first_line(path: Path) -> bytes | None:
    """The first line of a regular file, up to 16 KB; None if it cannot be read."""
    try:
        return next(read_blocks(path, 1 << 14), b"").partition(b"\n")[0]
    except (InputError, OSError):
        return None


def is_marked(line: bytes) -> bool:
    """Whether a line is a dropped document: it begins with the mark."""
    return line.startswith(b"{" + _MARKED)


def read_object(line: bytes, where: str, strings: Sequence[str], skip: Sequence[str] = ()) -> Document | str:
    """Parse a JSON object with strings under `strings`, without the keys in `skip`; or return what is wrong.

    Every value can be written as it was read. `where` is `file:line`. Raises InputError for a dropped document.
    """
    if len(line) > LONGEST_LINE:
        return f"longer than {LONGEST_LINE:,} bytes; split the document"
    try:
        found: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return f"not JSON ({error})"
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
    if _depth(document) > _DEEPEST:
        return f"nested more than {_DEEPEST} deep; flatten or remove that key"
    if _may_be_rounded(document) and _has_large_integer(line):
        return "an integer beyond 64 bits would be rounded; write it as a string"
    return document


def _depth(value: Any) -> int:
    """The nesting depth of values, at most _DEEPEST + 1; fast for flat documents."""
    level, depth = [value], 0
    while level and depth <= _DEEPEST:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in (dict, list)
        ]
    return depth


def _may_be_rounded(value: Any) -> bool:
    """Whether a value has a float that may have been an integer beyond 64 bits."""
    for inner in value.values() if type(value) is dict else value:
        kind = type(inner)  # not isinstance: this sees every value of a corpus
        if kind is dict or kind is list:
            if _may_be_rounded(inner):
                return True
        elif kind is float and abs(inner) >= _FIRST_ROUNDED:
            return True
    return False


def _has_large_integer(line: bytes) -> bool:
    integers: list[str] = []
    json.loads(line, parse_int=integers.append)
    return not all(-(2**63) <= int(digits) < 2**64 for digits in integers)


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
