"""Reads documents from JSON lines, and refuses documents that a step has dropped.

Every line in a file of rejects is marked: `{"dropped_by": "clean", …, "reason": "short"}`. All readers of documents and
URLs raise InputError at the first marked line, so rejects are never taken for a corpus.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from common.console import warn
from common.errors import InputError
from common.files.reading import read_blocks, read_lines

Document = dict[str, Any]

MARK = "dropped_by"
"""Key that only dropped documents have; its value is the step that dropped them."""
_MARKED = f'"{MARK}":'.encode()
_MARKED_LINE = re.compile(rb"^[ \t]*\{.*" + _MARKED, re.MULTILINE)


class BadLines:
    """Counts lines that are not documents; `check` raises if their share is too large."""

    def __init__(self, max_share: float) -> None:
        self.max_share = max_share
        self.lines = 0
        self.bad = 0
        self.first = ""

    def add(self, where: str) -> None:
        """Count one bad line; `where` is `file:line: what is wrong`."""
        self.bad += 1
        self.first = self.first or where
        if self.bad <= 10:  # enough to see the pattern without flooding the log
            warn(f"bad line skipped: {where}")

    def check(self) -> None:
        """Raise InputError if more than `max_share` of the lines are bad."""
        if self.bad > self.max_share * self.lines:
            raise InputError(
                f"{self.first}; {self.bad} of {self.lines} lines are bad, more than max_bad_share "
                f"{self.max_share:g}: repair the file or raise max_bad_share"
            )


def require_kept(found: Document, where: str) -> None:
    """Raise InputError for a document that a step has dropped; `where` is `file:line`."""
    if MARK in found:
        raise InputError(
            f"{where}: dropped by the step {found[MARK]}: the file holds rejects; name the step's shards instead, or "
            f'remove "{MARK}" from its lines to read them'
        )


def unmarked_blocks(path: Path) -> Iterator[bytes]:
    """`read_blocks` of a URL list. Raises InputError at a line that a step has dropped."""
    lines = 0
    for block in read_blocks(path):
        for match in _MARKED_LINE.finditer(block) if _MARKED in block else ():
            number = lines + block.count(b"\n", 0, match.start()) + 1
            require_kept(_object(block[match.start() :].partition(b"\n")[0]), f"{path}:{number}")
        lines += block.count(b"\n")
        yield block


def _object(line: bytes) -> Document:
    """The JSON object in a line; empty if the line holds none."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def first_line(path: Path) -> bytes | None:
    """The first line of a regular file, up to 16 KB; None if it cannot be read, which its reader will report."""
    try:
        return next(read_blocks(path, 1 << 14), b"").partition(b"\n")[0]
    except (InputError, OSError):
        return None


def is_marked(line: bytes) -> bool:
    """Whether a line, or the beginning of one, is a dropped document; those that we write begin with the mark."""
    return line.startswith(b"{" + _MARKED) or (_MARKED in line and MARK in _object(line))


def read_documents(path: Path, bad: BadLines | None = None) -> Iterator[Document]:
    """The documents of one JSON-lines file, decompressed according to its suffix.

    A document is an object with a string under "text" and one under "id". Other lines are counted in `bad`; without it,
    the first one raises InputError with file and line. A dropped document always raises.
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
                require_kept(document, f"{path}:{number}")
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
    """The documents of several files, in order; see `read_documents`."""
    for path in paths:
        yield from read_documents(path, bad)


def short_hash(text: str) -> str:
    """First 16 hex digits of sha256: the `id` of a document, from its canonical URL or else its text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
