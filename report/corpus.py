"""Figures about the corpus: hosts, languages, lengths, and clusters of duplicates."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from common.files import read_json
from report.drawing import bars_chart, histogram_chart, lumped, share_bars
from report.funnel import Step
from workflow import steps as table

_LUMPED = 4  # cluster sizes from here on are grouped by powers of two
_NAMED = 20  # values of a key of `meta` in the table


@dataclass(frozen=True)
class Corpus:
    """Figures about the corpus. A part is empty if the step that counts it has not run."""

    hosts: list[tuple[str, int]]
    """URLs by host, the largest first, `others` last; each shard names its 20 largest."""
    languages: list[tuple[str, int]]
    """Documents by ISO 639-1 code, the most frequent first."""
    lengths: list[tuple[str, int, int]]
    """(bytes, documents into clean, documents out of dedup)."""
    clusters: list[tuple[str, int]]
    """(documents in a cluster, clusters)."""
    largest: dict[str, Any] | None
    """The largest cluster: `documents`, `lowest_similarity`, some `ids`."""

    kept_by: tuple[list[str], list[tuple[str, str, list[int], int]]]
    """Steps, and (key of `meta`, value, documents out of each step, bytes out of the last), 20 values per key."""

    @property
    def charts(self) -> list[tuple[str, Markup]]:
        """Captions and drawings of the parts that there are."""
        languages = lumped([(language or "none", count) for language, count in self.languages])
        shares = [
            ("hosts", "Hosts, by URLs", "Shares of the hosts in the scraped URLs", self.hosts, "URLs"),
            ("languages", "Languages, by documents into clean", "Shares of the languages", languages, "documents"),
        ]
        found = [
            (caption, bars_chart(name, label, share_bars(counts, unit)))
            for name, caption, label, counts, unit in shares
            if counts
        ]
        if self.lengths:
            sizes = [_bytes(int(size.replace(",", ""))) for size, _, _ in self.lengths]
            series = [
                ("into clean", [before for _, before, _ in self.lengths]),
                ("out of dedup", [after for _, _, after in self.lengths]),
            ]
            axis = "bytes of text, from"
            chart = histogram_chart("lengths", "Lengths of the documents", sizes, series, axis, "documents")
            found.append(("Lengths of documents", chart))
        if self.clusters:
            sizes, counts = [name for name, _ in self.clusters], [count for _, count in self.clusters]
            axis = "documents in a cluster"
            chart = histogram_chart("clusters", "Sizes of the clusters", sizes, [("", counts)], axis, "clusters")
            found.append(("Clusters of duplicates", chart))
        return found


def _bytes(value: int) -> str:
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


def _kept_by(steps: Sequence[Step]) -> tuple[list[str], list[tuple[str, str, list[int], int]]]:
    """The table of `Corpus.kept_by`; the last row of a key has all documents that no other row has."""
    counted = [step for step in steps if step.kept_by]
    rows = []
    for key in sorted({key for step in counted for key, _ in step.kept_by}):
        total: Counter[str] = Counter()
        for step in counted:
            total.update({value: each["documents"] for (name, value), each in step.kept_by.items() if name == key})
        named = sorted(total, key=lambda value: (-total[value], value))[:_NAMED]
        cells = [[step.kept_by.get((key, value), Counter[str]()) for step in counted] for value in named]
        found = [
            (key, v, [cell["documents"] for cell in row], row[-1]["bytes"]) for v, row in zip(named, cells, strict=True)
        ]
        rest = [step.documents_out - sum(row[2][n] for row in found) for n, step in enumerate(counted)]
        rows += found
        if any(rest):
            rows.append((key, "others, or none given", rest, counted[-1].bytes_out - sum(row[3] for row in found)))
    return [step.name for step in counted], rows


def corpus_figures(run: Path, steps: Sequence[Step]) -> Corpus:
    """The figures in the statistics of a run's steps."""
    by_name = {step.name: step for step in steps}
    nothing = Step("", "")
    scrape, clean = by_name.get("scrape", nothing), by_name.get("clean", nothing)
    before = clean.counts.get("sizes_in", Counter())
    after = by_name.get("dedup", nothing).counts.get("sizes_out", Counter())
    clusters = table.result("dedup_clusters", run)
    figures = read_json(clusters) if clusters.exists() else {}
    hosts = scrape.counts.get("hosts", Counter())
    unnamed = scrape.documents_in - hosts.total() if hosts else 0
    return Corpus(
        hosts=lumped(list(hosts.items()), max(unnamed, 0)),
        languages=clean.counts.get("languages", Counter()).most_common(),
        lengths=[(f"{int(size):,}", before[size], after[size]) for size in sorted({*before, *after}, key=int)],
        clusters=_cluster_sizes(figures.get("cluster_sizes", {})),
        largest=figures.get("largest_cluster"),
        kept_by=_kept_by(steps),
    )
