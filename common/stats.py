"""Statistics of a step: counted while it runs, written as `stats.json` beside its output."""

import time
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.files import Document, write_json

_EXAMPLES = 10  # kept per reason
_EXAMPLE_CHARACTERS = 200  # kept of each text
_COUNTS = ("documents_in", "documents_out", "bytes_in", "bytes_out")


@dataclass
class Stats:
    """Counters of one run of one step.

    `documents_in == documents_out + sum(reasons.values())` holds at the end of every step that filters.
    Bytes are UTF-8 bytes of the texts (of the URLs in the blacklist step).
    """

    step: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Dropped documents by reason."""
    examples: defaultdict[str, list[Document]] = field(default_factory=lambda: defaultdict(list))
    """A few of them by reason, always the same: those with the smallest ids, which are hashes, or the first URLs."""
    sizes_in: Counter[int] = field(default_factory=Counter)
    """Documents by the bit length of their size in bytes: 10 means 512 to 1,023 bytes."""
    sizes_out: Counter[int] = field(default_factory=Counter)
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

    def drop(self, reason: str, document: Document) -> None:
        """Count one dropped document (or URL, without `id` and `text`), and keep its beginning if it is an example."""
        self.reasons[reason] += 1
        examples = self.examples[reason]
        if len(examples) < _EXAMPLES or document.get("id", "") < examples[-1].get("id", ""):
            text = {"text": document["text"][:_EXAMPLE_CHARACTERS]} if "text" in document else {}
            insort(examples, {**document, **text}, key=_id)
            del examples[_EXAMPLES:]

    def add(self, other: "Stats") -> None:
        """Add the counts of another part of the step."""
        for name in (*_COUNTS, "reasons", "sizes_in", "sizes_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, examples in other.examples.items():
            self.examples[reason] = sorted(self.examples[reason] + examples, key=_id)[:_EXAMPLES]

    def as_dict(self) -> dict[str, Any]:
        """Plain data in a stable order, with the seconds since the step began."""
        counts = {name: getattr(self, name) for name in ("step", *_COUNTS)}
        counts["reasons"] = dict(sorted(self.reasons.items()))
        for name in ("sizes_in", "sizes_out"):
            if sizes := getattr(self, name):
                counts[name] = _histogram(sizes)
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


def _id(document: Document) -> str:
    return str(document.get("id", ""))


def _histogram(sizes: Counter[int]) -> dict[str, int]:
    """`{"512": 7}`: documents of 512 to 1,023 bytes."""
    return {str(1 << bits >> 1): count for bits, count in sorted(sizes.items())}
