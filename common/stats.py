"""Statistics of a step: counted while it runs, written as `stats.json` beside its output."""

import re
import time
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common.errors import InputError
from common.files import Document, read_json, write_json

_EXAMPLES = 10  # kept per reason
_EXAMPLE_CHARACTERS = 200  # kept of each text
_META = ("source", "language", "detected_language")  # keys of `meta` whose values are counted
_VALUES = 1000  # values counted per key, the first ones; truncated to 100 characters
_WRITTEN = 50  # most frequent values written per key
_COUNTS = ("documents_in", "documents_out", "bytes_in", "bytes_out")


@dataclass
class Stats:
    """Counters of one run of one step.

    `documents_in == documents_out + sum(reasons.values())` holds at the end of every step that
    filters. Bytes are UTF-8 bytes of the texts (of the URLs in the blacklist step).
    """

    step: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Dropped documents by reason."""
    examples: defaultdict[str, list[Document]] = field(default_factory=lambda: defaultdict(list))
    """Some of them by reason: those with the smallest ids (hashes), or the first URLs."""
    sizes_in: Counter[int] = field(default_factory=Counter)
    """Documents by the bit length of their size in bytes: 10 means 512 to 1,023 bytes."""
    sizes_out: Counter[int] = field(default_factory=Counter)
    kept_by: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """(documents, bytes) that were kept, by `host` or key of `meta`, and by value."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Figures that only this step has (tokens, clusters, …)."""
    _started: float = field(default_factory=time.monotonic, repr=False)

    def counted(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents, counting each one as an input."""
        for document in documents:
            size = len(document["text"].encode())
            self.documents_in += 1
            self.bytes_in += size
            self.sizes_in[size.bit_length()] += 1
            yield document

    def keep(self, document: Document) -> None:
        """Count one surviving document."""
        size = len(document["text"].encode())
        self.documents_out += 1
        self.bytes_out += size
        self.sizes_out[size.bit_length()] += 1
        self.count_kept_by(document, size)

    def count_kept_by(self, document: Document, size: int) -> None:
        """Count a surviving document of `size` bytes by its host and its `meta`."""
        if host := _host("/".join(str(document.get("url") or "").split("/", 3)[:3])):
            self._count("host", host, 1, size)
        if isinstance(meta := document.get("meta"), dict):
            for key in _META:
                if isinstance(value := meta.get(key), str):
                    self._count(key, value[:100], 1, size)

    def _count(self, key: str, value: str, documents: int, size: int) -> None:
        values = self.kept_by.setdefault(key, {})
        if value in values or len(values) < _VALUES:
            before = values.get(value, (0, 0))
            values[value] = (before[0] + documents, before[1] + size)

    def drop(self, reason: str, document: Document) -> None:
        """Count a dropped document, or a URL without `id` and `text`; keep some as examples."""
        self.reasons[reason] += 1
        examples = self.examples[reason]
        if len(examples) < _EXAMPLES or document.get("id", "") < examples[-1].get("id", ""):
            short = {key: value for key, value in document.items() if key != "meta"}
            if "text" in document:
                short["text"] = document["text"][:_EXAMPLE_CHARACTERS]
            insort(examples, short, key=_id)
            del examples[_EXAMPLES:]

    def add(self, other: "Stats") -> None:
        """Add the counts of another part of the step."""
        for name in (*_COUNTS, "reasons", "sizes_in", "sizes_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for key, values in other.kept_by.items():
            for value, counts in values.items():
                self._count(key, value, *counts)
        for reason, examples in other.examples.items():
            self.examples[reason] = sorted(self.examples[reason] + examples, key=_id)[:_EXAMPLES]

    def as_dict(self) -> dict[str, Any]:
        """JSON types in a stable order, with the seconds since the step began."""
        counts = {name: getattr(self, name) for name in ("step", *_COUNTS)}
        counts["reasons"] = dict(sorted(self.reasons.items()))
        for name in ("sizes_in", "sizes_out"):
            if sizes := getattr(self, name):
                counts[name] = histogram(sizes)
        if self.kept_by:
            counts["kept_by"] = {key: _most_frequent(values) for key, values in sorted(self.kept_by.items())}
        if self.examples:
            counts["examples"] = dict(sorted(self.examples.items()))
        return {**counts, "seconds": round(time.monotonic() - self._started, 3), **self.extra}

    def finish(self, path: Path | None) -> None:
        """Write everything as JSON if there is a path, and print a summary for people."""
        if path is not None:
            write_json(path, self.as_dict())
        print(self)

    def dropped(self) -> str:
        """`30 short, 7 language`: the reasons by count, for messages."""
        return ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common()) or "none"

    def __str__(self) -> str:
        tokens = f"; {self.extra['tokens']:,} tokens" if "tokens" in self.extra else ""
        kept = f"{self.documents_out} of {self.documents_in} documents kept"
        return f"{self.step}: {kept}; dropped: {self.dropped()}{tokens}"


def no_documents(inputs: Sequence[Path], run: Path) -> str:
    """The error for shards without documents; names the step that dropped them all."""
    totals, shards = defaultdict[Path, Stats](lambda: Stats("")), {re.split("[._]", path.name)[0] for path in inputs}
    for path in sorted(run.glob("*/*stats.json")):
        if path.name.split(".")[0] in {"stats", *shards}:
            part = read_json(path)
            read, kept = (part.get(f"documents_{end}", 0) for end in ("in", "out"))
            totals[path.parent].add(Stats("", read, kept, reasons=Counter(part.get("reasons", {}))))
    empty = [(folder, each) for folder, each in totals.items() if each.documents_in and not each.documents_out]
    why = [f"; of {each.documents_in} in {folder}, all were dropped ({each.dropped()})" for folder, each in empty]
    cure = "; change the settings of that step, or give other input" if why else ""
    return f"{inputs[0]}: no documents in {len(inputs)} shard(s){''.join(why)}{cure}"


@lru_cache(1024)  # a shard has the pages of few hosts
def _host(origin: str) -> str:
    """The host of a URL up to its path; empty if it has none."""
    with suppress(ValueError):  # not a URL
        return (urlsplit(origin).hostname or "")[:100]
    return ""


def _id(document: Document) -> str:
    return str(document.get("id", ""))


def histogram(sizes: Counter[int]) -> dict[str, int]:
    """Counts by bit length as `{"512": 7}`: documents of 512 to 1,023 bytes, or tokens."""
    return {str(1 << bits >> 1): count for bits, count in sorted(sizes.items())}


def _most_frequent(values: dict[str, tuple[int, int]]) -> dict[str, dict[str, int]]:
    """`{"wiki": {"documents": 7, "bytes": 900}}`, the most documents first."""
    ordered = sorted(values.items(), key=lambda item: (-item[1][0], item[0]))[:_WRITTEN]
    return {value: {"documents": documents, "bytes": size} for value, (documents, size) in ordered}


def kept_before(shards: Iterable[Path | str]) -> int | None:
    """The number of documents in shards, for progress, by the statistics beside them."""
    paths = [path.with_name(f"{path.name.partition('.')[0]}.stats.json") for path in map(Path, shards)]
    known = all(map(Path.is_file, paths))
    with suppress(InputError):  # damaged
        return sum(read_json(path).get("documents_out", 0) for path in paths) or None if known else None
    return None
