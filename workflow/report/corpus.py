"""Figures about the corpus: hosts, languages, lengths, and clusters of duplicates."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from common import steps as table
from common.files import read_json
from workflow.report.drawing import histogram_chart
from workflow.report.funnel import FunnelStep

_LUMPED = 4  # cluster sizes from here on are grouped by powers of two
_NAMED = 20  # hosts, and values of a key of `meta`, in a table
_BARS = 4  # a chart of fewer says no more than its table


class Host(NamedTuple):
    """Counts of a host's documents by outcome."""

    name: str
    arrived: int
    """URLs to fetch, or documents that ingest read."""
    kept: int
    tokens: int

    @property
    def dropped(self) -> int:
        """Documents that are not in the dataset."""
        return self.arrived - self.kept


@dataclass(frozen=True)
class Corpus:
    """Figures about the corpus. A part is empty if the step that counts it has not run."""

    hosts: list[Host]
    """The largest, then `others`; each shard names its 20 with the most URLs and its 50 with the most documents."""
    languages: list[tuple[str, int]]
    """Documents by ISO 639-1 code, the most frequent first."""
    lengths: list[tuple[str, int, int]]
    """(bytes, documents into clean, documents out of dedup)."""
    token_lengths: list[tuple[str, int]]
    """(tokens, documents of the dataset)."""
    clusters: list[tuple[str, int]]
    """(documents in a cluster, clusters)."""
    largest: dict[str, Any] | None
    """The largest cluster: `documents`, `lowest_similarity`, some `ids`."""
    near: list[tuple[dict[str, Any], dict[str, Any]]]
    """Some near duplicates, each with its `similarity`, and their survivors; the least similar first."""

    kept_by: tuple[list[str], list[tuple[str, str, list[int], int]]]
    """Steps, and (key of `meta`, value, documents out of each step, tokens of the last), 20 values per key."""

    @property
    def charts(self) -> list[tuple[str, Markup]]:
        """Captions and drawings of the histograms with enough bars."""
        names = [name for name, *_ in self.lengths]
        both = [("into clean", [row[1] for row in self.lengths]), ("out of dedup", [row[2] for row in self.lengths])]
        found = [("lengths", "Documents by length", names, both, "bytes of text, from", "documents")]
        for name, caption, rows, axis, unit in (
            ("tokens", "Documents by tokens", self.token_lengths, "tokens, from", "documents"),
            ("clusters", "Clusters of duplicates by size", self.clusters, "documents in a cluster", "clusters"),
        ):
            found.append((name, caption, [size for size, _ in rows], [("", [count for _, count in rows])], axis, unit))
        return [(each[1], histogram_chart(*each)) for each in found if len(each[2]) >= _BARS]


def _power(value: int) -> str:
    """`2 Ki`: sizes are powers of two."""
    for unit in ("", "Ki", "Mi"):
        if value < 1024:
            return f"{value} {unit}".strip()
        value //= 1024
    return f"{value} Gi"


def _cluster_sizes(sizes: dict[str, int]) -> list[tuple[str, int]]:
    grouped: Counter[int] = Counter()
    for size, count in ((int(size), count) for size, count in sizes.items()):
        grouped[size if size < _LUMPED else 1 << (size.bit_length() - 1)] += count
    return [(str(size) if size < _LUMPED else f"{size} to {2 * size - 1}", grouped[size]) for size in sorted(grouped)]


def _tokens(step: FunnelStep, size: int) -> int:
    """The tokens in bytes of a token file."""
    return size * (step.tokens or 0) // (step.bytes_out or 1)


def _hosts(by_name: dict[str, FunnelStep]) -> list[Host]:
    """The largest hosts, and all others together."""
    scrape, ingest, end = (by_name.get(name, FunnelStep("", "")) for name in ("scrape", "ingest", "tokenize"))
    arrived = Counter(scrape.counts.get("hosts", {}))
    arrived.update({host: each["documents"] for (key, host), each in ingest.kept_by.items() if key == "host"})
    named = sorted(arrived, key=lambda host: (-arrived[host], host))[:_NAMED]
    kept = [end.kept_by.get(("host", host), Counter[str]()) for host in named]
    hosts = [
        Host(name, arrived[name], each["documents"], _tokens(end, each["bytes"]))
        for name, each in zip(named, kept, strict=True)
    ]
    others = Host(
        "others",
        scrape.documents_in + ingest.documents_out - sum(host.arrived for host in hosts),
        end.documents_out - sum(host.kept for host in hosts),
        (end.tokens or 0) - sum(host.tokens for host in hosts),
    )
    return [*hosts, others] if hosts and others.arrived else hosts


def _kept_by(steps: Sequence[FunnelStep]) -> tuple[list[str], list[tuple[str, str, list[int], int]]]:
    """The table of `Corpus.kept_by`, from clean on; the last row of a key has all documents that no other row has."""
    names = [step.name for step in steps]  # before clean, most documents have no meta
    first = names.index("clean") if "clean" in names else 0
    counted = [step for step in steps[first:] if step.kept_by]
    rows = []
    for key in sorted({key for step in counted for key, _ in step.kept_by} - {"host"}):
        total: Counter[str] = Counter()
        for step in counted:
            total.update({value: each["documents"] for (name, value), each in step.kept_by.items() if name == key})
        named = sorted(total, key=lambda value: (-total[value], value))[:_NAMED]
        cells = [[step.kept_by.get((key, value), Counter[str]()) for step in counted] for value in named]
        found = [
            (key, value, [cell["documents"] for cell in row], _tokens(counted[-1], row[-1]["bytes"]))
            for value, row in zip(named, cells, strict=True)
        ]
        rest = [step.documents_out - sum(row[2][n] for row in found) for n, step in enumerate(counted)]
        if any(rest):
            found.append((key, "others, or none given", rest, (counted[-1].tokens or 0) - sum(row[3] for row in found)))
        rows += found if len(found) > 1 else []  # one value says nothing
    return [step.name for step in counted], rows


def corpus_figures(run: Path, steps: Sequence[FunnelStep]) -> Corpus:
    """The figures in the statistics of a run's steps."""
    by_name = {step.name: step for step in steps}
    counts = {name: step.counts for name, step in by_name.items()}
    before, languages = (counts.get("clean", {}).get(name, Counter[str]()) for name in ("sizes_in", "languages"))
    after = counts.get("dedup", {}).get("sizes_out", Counter[str]())
    tokens = counts.get("tokenize", {}).get("token_lengths", Counter[str]())
    clusters = table.result("dedup_clusters", run)
    figures = read_json(clusters) if clusters.exists() else {}
    near = [(dropped, survivor) for dropped, survivor in (pair for pair in figures.get("near", []) if len(pair) == 2)]
    return Corpus(
        hosts=_hosts(by_name),
        languages=languages.most_common(),
        lengths=[(_power(int(size)), before[size], after[size]) for size in sorted({*before, *after}, key=int)],
        token_lengths=[(_power(int(size)), tokens[size]) for size in sorted(tokens, key=int)],
        clusters=_cluster_sizes(figures.get("cluster_sizes", {})),
        largest=figures.get("largest_cluster"),
        near=sorted(near, key=lambda pair: pair[0]["similarity"]),  # of a removed document, only the other is left
        kept_by=_kept_by(steps),
    )
