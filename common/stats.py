"""What a step did, in numbers: counted while it runs, written as `stats.json` beside its output."""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.files import Document, write_json


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
    extra: dict[str, Any] = field(default_factory=dict)
    """Figures only this step has (tokens, clusters, …)."""
    _started: float = field(default_factory=time.monotonic, repr=False)

    def counted(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents, counted as they pass into the step."""
        for document in documents:
            self.documents_in += 1
            self.bytes_in += len(document["text"].encode())
            yield document

    def keep(self, size: int) -> None:
        """Count one surviving document of `size` bytes."""
        self.documents_out += 1
        self.bytes_out += size

    def as_dict(self) -> dict[str, Any]:
        """Plain data in a stable order, with the seconds since the step began."""
        return {
            "step": self.step,
            "documents_in": self.documents_in,
            "documents_out": self.documents_out,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "reasons": dict(sorted(self.reasons.items())),
            "seconds": round(time.monotonic() - self._started, 3),
            **self.extra,
        }

    def finish(self, path: Path | None) -> None:
        """Print a line for people, and write everything as JSON where there is a path."""
        if path is not None:
            write_json(path, self.as_dict())
        print(self.table() if sys.stdout.isatty() else self)

    def table(self) -> str:
        """The counts as lines for a terminal, the most frequent reason first."""
        rows = [("kept", self.documents_out), *self.reasons.most_common(), ("all", self.documents_in)]
        width = max(len(name) for name, _ in rows)
        share = 100 / max(self.documents_in, 1)
        lines = (f"  {name:<{width}} {count:>14,} {count * share:6.1f} %" for name, count in rows)
        return "\n".join([f"{self.step}:", *lines])

    def dropped(self) -> str:
        """`30 short, 7 language`: the reasons by count, for messages."""
        return ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common()) or "none"

    def __str__(self) -> str:
        tokens = f"; {self.extra['tokens']:,} tokens" if "tokens" in self.extra else ""
        kept = f"{self.documents_out} of {self.documents_in} documents kept"
        return f"{self.step}: {kept}; dropped: {self.dropped()}{tokens}"
