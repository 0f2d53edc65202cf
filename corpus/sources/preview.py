"""Reads the beginning of sources before a run, by the functions with which `corpus.ingest` reads.

Refuses only what ingest would certainly refuse; what it may refuse is a note. Opens a bounded
number of files, because each may take milliseconds on a network file system.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, groupby, islice
from math import inf
from operator import attrgetter
from pathlib import Path

from common.console import note
from common.errors import InputError
from common.files import BadLines, find_inputs, is_readable
from common.settings import SourceSettings
from corpus.runner import ShardStep
from corpus.sources.formats import READERS, recognised
from corpus.sources.lines import JUDGED

_HEADS = 1000  # files per source of which the format is recognised
_READ = 16  # files per source that are read: JUDGED documents of each
_LONG = 8 << 20  # bytes; longer text files are left to ingest, because a text is read whole
_SMALL = 1 << 20  # bytes of all files; if there is no more, all of it is read, and nothing is uncertain


class _Enough(Exception):
    """No more of a file needs to be read."""


class _Tried(BadLines):
    """Counts bad lines like those of a step, without warnings."""

    def __init__(self, like: BadLines) -> None:
        super().__init__(like.max_share, like.unit, like.cure, like.named)
        self.limit: int | None = None

    def add(self, where: str) -> None:
        """Count one bad line. Raises _Enough if there are `limit`."""
        self.count(where)
        if self.bad == self.limit:
            raise _Enough


def preview(sources: Sequence[SourceSettings], max_bad_share: float | None, known: Collection[str] = ()) -> None:
    """Raise InputError if ingest would refuse a source; print a note if it may.

    Leaves out the absolute paths in `known`, which an earlier run has read. A source without files
    is skipped; then, as without `max_bad_share`, no share of bad lines is refused.
    """
    found = [_files(source, known) for source in sources]
    count = sum(map(len, found))
    is_small = count <= _HEADS and sum(map(_size, chain.from_iterable(found))) <= _SMALL
    step = ShardStep("ingest", max_bad_share=max_bad_share)
    lines, texts = _Tried(step.bad), _Tried(step.bad_files)
    for source, paths in zip(sources, found, strict=True):
        formats = {path: _format(path, source) for path in _spread(paths, _HEADS)}
        readable = [path for path, (format, _) in formats.items() if format in READERS and path.is_file()]
        for path in readable if is_small else _spread(readable, _READ):
            format, exact = formats[path]
            if not is_small and format == "text" and _size(path) > _LONG:
                continue
            tried = texts if format == "text" else lines
            tried.limit = None if is_small else tried.bad + JUDGED + 1
            with _in_one_line(path), suppress(_Enough):
                for _ in islice(READERS[format](path, exact, tried), None if is_small else JUDGED):
                    pass
    uncertain = [] if is_small else [tried for tried in (lines, texts) if tried.bad]
    notes = [f"{bad.first}; {bad.bad} of {bad.lines} {bad.unit}s that were tried are bad" for bad in uncertain]
    if max_bad_share is not None and all(found):
        if is_small:
            lines.check()
        else:
            texts.lines = count  # there are no more
        texts.check()
    for line in notes:
        note(f"{line}; max_bad_share limits their share of all")


def _files(source: SourceSettings, known: Collection[str]) -> list[Path]:
    """The files that ingest reads; a note names a broken link, which it leaves out."""
    found = [find_inputs(pattern, "sources") for pattern in source.patterns]
    if broken := [path for _, left_out in found for path in left_out if path.is_symlink() and not path.exists()]:
        note(f"{broken[0]}: a broken link, left out{f', and {len(broken) - 1} more' if broken[1:] else ''}")
    paths = dict.fromkeys(path for files, _ in found for path in files)
    return [path for path in paths if not known or os.path.abspath(path) not in known]


def _size(path: Path) -> float:
    """Bytes of a regular file; infinite for what cannot be read twice, such as a pipe."""
    return path.stat().st_size if path.is_file() else inf


def _spread(paths: Sequence[Path], most: int) -> list[Path]:
    """At most `most` paths, evenly spread over those of each suffix: one stray file is seen."""
    if len(paths) <= most:
        return list(paths)
    suffix = attrgetter("suffix")
    groups = [list(group) for _, group in groupby(sorted(paths, key=suffix), suffix)]
    groups = groups[:: -(-len(groups) // most)]
    each = most // len(groups)
    return [path for group in groups for path in group[:: -(-len(group) // each)]]


def _format(path: Path, source: SourceSettings) -> tuple[str, SourceSettings]:
    with _in_one_line(path):
        if not is_readable(path):
            raise InputError(f"{path}: {'a broken link' if path.is_symlink() else 'no such file'}; restore the file")
        return recognised(path, source)


@contextmanager
def _in_one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror or error}); make it readable, or leave it out with glob"
        ) from None
