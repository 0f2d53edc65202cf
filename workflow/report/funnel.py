"""The funnel: documents that each corpus step kept and dropped, over all shards."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import steps
from common.page import size
from common.settings import Settings

_EXAMPLES = 10  # kept per reason
_REASONS = 5  # drawn separately; the others share the last colour


@dataclass(frozen=True)
class Bar:
    """A horizontal bar of coloured parts, with a caption above and a legend of the parts."""

    above: str
    parts: Sequence[tuple[str, float]]
    """(label, length) of each part."""
    breakdown: Sequence[tuple[str, float]] = ()
    """(label, length) of the parts of the last part, for a thin bar below it."""

    @property
    def length(self) -> float:
        """Total of all parts."""
        return sum(length for _, length in self.parts)


@dataclass
class FunnelStep:
    """One step of the funnel."""

    name: str
    unit: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    tokens: int | None = None
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """By `reasons`, `languages`, `sizes_in`, `sizes_out`, `token_lengths`; URLs by `hosts`."""
    evaluation_sets: dict[str, Counter[str]] = field(default_factory=dict)
    """`hits` and `documents` by evaluation set."""
    kept_by: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    """`documents` and `bytes` that were kept, by a key of `meta`, or `host`, and its value."""
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Dropped documents by reason: those with the smallest ids, for a reproducible sample."""
    libraries: dict[str, str] = field(default_factory=dict)

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """Dropped documents by reason, the most frequent first."""
        return sorted(self.counts.get("reasons", Counter()).items(), key=lambda item: (-item[1], item[0]))

    @property
    def dropped(self) -> int:
        """Documents that did not survive the step."""
        return self.documents_in - self.documents_out

    @property
    def share(self) -> float:
        """Share of the documents that were kept, 0 to 1."""
        return self.documents_out / self.documents_in if self.documents_in else 0.0

    def add(self, shard: Mapping[str, Any]) -> None:
        """Add the statistics of one shard."""
        self.documents_in += shard["documents_in"]
        self.documents_out += shard["documents_out"]
        self.bytes_out += shard["bytes_out"]
        if "tokens" in shard:
            self.tokens = (self.tokens or 0) + shard["tokens"]
        hosts = {host: counts["urls"] for host, counts in shard.get("hosts", {}).items()}
        for name in ("reasons", "languages", "sizes_in", "sizes_out", "token_lengths"):
            self.counts.setdefault(name, Counter()).update(shard.get(name, {}))
        self.counts.setdefault("hosts", Counter()).update(hosts)
        for name, counts in shard.get("evaluation_sets", {}).items():
            both = {"hits": counts["hits"], "documents": counts["documents"]}
            self.evaluation_sets.setdefault(name, Counter()).update(both)
        for key, values in shard.get("kept_by", {}).items():
            for value, counts in values.items():
                self.kept_by.setdefault((key, value), Counter()).update(counts)
        for reason, documents in shard.get("examples", {}).items():
            known = self.examples.get(reason, [])
            # URLs have no id
            self.examples[reason] = sorted([*known, *documents], key=lambda each: str(each.get("id", "")))[:_EXAMPLES]
        self.libraries.update(shard.get("libraries", {}))


def funnel(run: Path, settings: Settings | None = None) -> list[FunnelStep]:
    """The steps of a run with statistics, in the order of the DAG.

    With `settings`, only its steps and shards.
    """
    with_figures = []
    for each in steps.configured(settings) if settings else steps.CORPUS:
        parts = list(each.figures(run, settings.shards if settings else None)) if each.unit else []
        step = FunnelStep(each.name, each.unit)
        for part in parts:
            step.add(part)
        if parts:
            with_figures.append(step)
    return with_figures


def documents_chart(steps: Sequence[FunnelStep]) -> list[Bar]:
    """A bar per step: documents kept, and documents dropped by reason."""
    bars = []
    for step in steps:
        if step.name == "merge_index" and len(steps) > 1:
            continue  # drops nothing: the line above it again
        few = len(step.reasons) if len(step.reasons) <= _REASONS + 1 else _REASONS
        first, rest = step.reasons[:few], sum(count for _, count in step.reasons[few:])
        reasons = [*first, *([(f"others ({len(step.reasons) - few} reasons)", rest)] if rest else [])]
        volume = size(step.bytes_out) if step.tokens is None else f"{step.tokens:,} tokens"
        kept = f"{step.name}: {step.documents_out:,} of {step.documents_in:,} {step.unit} kept ({step.share:.1%})"
        above = kept if step.unit == "URLs" else f"{kept}, {volume}"
        parts = [(f"{step.documents_out:,} kept", step.documents_out), (f"{step.dropped:,} dropped", step.dropped)]
        bars.append(Bar(above, parts, [(f"{count:,} {reason}", count) for reason, count in reasons]))
    return bars
