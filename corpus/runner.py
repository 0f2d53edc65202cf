"""Run a step over shards: read, map over processes, keep or drop with a reason, write, count.

    def shorten(document: Document) -> Document | Drop:
        text = document["text"][:1000]
        return {**document, "text": text} if text else Drop(document, "empty")

    stats = ShardStep("shorten", inputs, rejects, workers=8).run(shorten, document_writer(output))

Results keep the order of the documents, so any number of workers writes the same bytes. `run` has
two parts that a step may use by itself: `map` reads and computes, `results` writes and counts.
"""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from common.errors import EmptyResultError, InputError
from common.files import (
    BadLines,
    Document,
    Fingerprint,
    check_outputs,
    document_writer,
    fingerprint,
    first_change,
    read_shards,
    require_distinct_stems,
    require_regular,
    shard_stem,
)
from common.progress import Meter
from common.settings import Settings
from common.stats import Stats, kept_before
from common.workers import Workers, batched

Item = TypeVar("Item")
Result = TypeVar("Result")
Write = Callable[[Document], object]

BATCH = 32  # documents sent to a worker at once: cleaning them takes some ten milliseconds


@dataclass(frozen=True)
class Drop:
    """A document that a step drops."""

    document: Document
    reason: str
    """One word, counted in the statistics."""
    detail: str = ""
    """What is wrong, for people: "312 characters"; written to the rejects."""


Outcome = Document | Drop


@dataclass(frozen=True)
class Results:
    """Writes and counts what a step keeps and drops."""

    stats: Stats
    meter: Meter
    write: Write
    reject: Write

    def keep(self, document: Document) -> None:
        """Count and write a document."""
        self.stats.keep(document)
        self.write(document)

    def drop(self, document: Document, reason: str, detail: str = "") -> None:
        """Count and write a reject."""
        rejected = document | {"reason": reason} | ({"detail": detail} if detail else {})
        self.stats.drop(reason, rejected)
        self.reject(rejected)

    def record(self, outcome: Outcome) -> None:
        """Keep or drop a document, and advance the progress."""
        if isinstance(outcome, Drop):
            self.drop(outcome.document, outcome.reason, outcome.detail)
        else:
            self.keep(outcome)
        self.meter.advance()


class StepOptions(TypedDict, total=False):
    """Fields of `ShardStep` that every step takes."""

    rejects: Path | None
    workers: int
    max_bad_share: float | None
    allow_empty: bool


def step_options(arguments: argparse.Namespace, settings: Settings) -> StepOptions:
    """The options of a command that called `cli.add_step_options`."""
    return {
        "rejects": arguments.rejects,
        "workers": arguments.workers,
        "max_bad_share": settings.max_bad_share,
        "allow_empty": arguments.allow_empty,
    }


@dataclass
class ShardStep:
    """One run of a step over shards."""

    name: str
    inputs: Sequence[Path | str] = ()
    """Shards that `documents` reads; named in errors."""
    rejects: Path | None = None
    workers: int = 1
    max_bad_share: float | None = 0.001
    """Largest accepted share of bad lines; None turns the check off."""
    allow_empty: bool = False
    """Whether the step may keep no document."""
    cure: str = ""
    """What to change if it kept none."""
    unit: str = "documents"
    stats: Stats = field(init=False)
    bad: BadLines = field(init=False)
    bad_files: BadLines = field(init=False)

    def __post_init__(self) -> None:
        self.stats = Stats(self.name)
        self.bad = BadLines(self.max_bad_share or 0)
        cure = "give files of another encoding a source with their `encoding`, such as cp1252, move others away,"
        self.bad_files = BadLines(self.max_bad_share or 0, "file", cure, named=10)

    def documents(self) -> Iterator[Document]:
        """The documents of the inputs. Counts them and the bad lines, which are skipped."""
        return self.stats.counted(read_shards(map(Path, self.inputs), self.bad))

    def new_files(self, paths: Iterable[Path], known: Mapping[str, Fingerprint] | None = None) -> Iterator[Path]:
        """Yield the paths that are not `known`, and put fingerprints of all into the statistics.

        `known` has those of an earlier run by absolute path; InputError if such a file has changed.
        """
        fingerprints = self.stats.extra.setdefault("inputs", {})
        for path in paths:
            if known and (then := known.get(os.path.abspath(path))):
                if change := first_change({str(path): then}, [path]):
                    raise InputError(
                        f"{change} by a run that this one extends, which has its old documents; restore it, and put "
                        "new documents into a file of another name"
                    )
                fingerprints[str(path)] = then
                self.stats.extra["known_files"] = self.stats.extra.get("known_files", 0) + 1
            else:
                if path.is_file():  # not a pipe
                    fingerprints[str(path)] = fingerprint(path)
                yield path

    @contextmanager
    def map(self, function: Callable[[Any], Result], items: Iterable[Any] | None = None) -> Iterator[Iterator[Result]]:
        """Yield `function(item)` for each of `items` (default: documents).

        Enter it before `results`: worker processes are forked and must not inherit open outputs.
        """
        batches = batched(self.documents() if items is None else items, BATCH)
        with Workers(self.workers) as pool:
            yield chain.from_iterable(pool.map(partial(_each, function), batches))

    @contextmanager
    def results(self, writer: AbstractContextManager[Write] | None = None, unit: str = "") -> Iterator[Results]:
        """Yield a `Results` over `writer` (default: counts only).

        If the block succeeds, all files appear; otherwise none. Raises InputError for too many bad
        lines, EmptyResultError if nothing was kept.
        """
        with (
            writer or nullcontext(lambda _: None) as write,
            document_writer(self.rejects, self.name) as reject,
            Meter(self.name, unit or self.unit, kept_before(self.inputs)) as meter,
        ):
            yield Results(self.stats, meter, write, reject)
            if self.max_bad_share is not None:
                self.bad_files.check()
                self.bad.check()
                self.stats.extra["bad_lines"] = self.bad.bad
            if not self.stats.documents_out and not self.allow_empty:
                raise EmptyResultError(self._empty())

    def run(
        self,
        function: Callable[[Any], Outcome],
        writer: AbstractContextManager[Write],
        items: Iterable[Any] | None = None,
    ) -> Stats:
        """Write what `function` keeps of `items` (default: documents)."""
        with self.map(function, items) as outcomes, self.results(writer) as results:
            for outcome in outcomes:
                results.record(outcome)
        return self.stats

    def _empty(self) -> str:
        """`a.zst …: none of 7 documents is left (7 short); CURE`."""
        inputs = f"{self.inputs[0]}{' …' if len(self.inputs) > 1 else ''}: " if self.inputs else ""
        if not self.stats.documents_in:
            return f"{inputs}no {self.unit} inside"
        cure = f"; {self.cure}" if self.cure else ""
        return f"{inputs}none of {self.stats.documents_in} {self.unit} is left ({self.stats.dropped()}){cure}"


def shard_outputs(inputs: Sequence[Path], folder: Path, step: str, read: Iterable[Path] = ()) -> dict[Path, list[Path]]:
    """Paths of documents, rejects and statistics per shard, for a `step` that reads shards twice.

    Raises InputError for a pipe, two shards of one name, and an output that is in `inputs` or
    `read`.
    """
    require_regular(inputs, step)
    require_distinct_stems(inputs)
    outputs = {}
    for path in inputs:
        name = f"{shard_stem(path)}.jsonl.zst"
        outputs[path] = [folder / name, folder / "rejects" / name, folder / f"{shard_stem(path)}.stats.json"]
    check_outputs(chain.from_iterable(outputs.values()), [*inputs, *read])
    return outputs


def grouped(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Lists of consecutive items; each list ends when its sizes add up to `limit`."""
    group, held = list[Item](), 0
    for item in items:
        group.append(item)
        held += size(item)
        if held >= limit:
            yield group
            group, held = [], 0
    if group:
        yield group


def _each(function: Callable[[Item], Result], items: list[Item]) -> list[Result]:
    return [function(item) for item in items]
