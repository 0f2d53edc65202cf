"""Figures about the corpus: languages, lengths, clusters of duplicates, and examples of dropped documents."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import read_json
from report.funnel import STEPS, statistics

_EXAMPLES = 10  # shown per reason
_LUMPED = 4  # cluster sizes from here on are grouped by powers of two


@dataclass(frozen=True)
class Examples:
    """Documents that a step dropped for one reason: those with the smallest ids, for a reproducible sample."""

    step: str
    reason: str
    documents: list[dict[str, Any]]


@dataclass(frozen=True)
class Corpus:
    """Figures about the corpus. A part is empty if the step that counts it has not run."""

    languages: list[tuple[str, int]]
    """Documents by ISO 639-1 code, the most frequent first."""
    lengths: list[tuple[str, int, int]]
    """(bytes, documents into clean, documents out of dedup)."""
    clusters: list[tuple[str, int]]
    """(documents in a cluster, clusters)."""
    largest: dict[str, Any] | None
    """The largest cluster: `documents`, `lowest_similarity`, some `ids`."""
    evaluation_sets: list[tuple[str, int, int]]
    """(name, hits, documents touched)."""
    examples: list[Examples]


def _sum(parts: list[dict[str, Any]], key: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part.get(key, {}))
    return total


def _cluster_sizes(sizes: dict[str, int]) -> list[tuple[str, int]]:
    lumped: Counter[int] = Counter()
    for size, count in ((int(size), count) for size, count in sizes.items()):
        lumped[size if size < _LUMPED else 1 << (size.bit_length() - 1)] += count
    return [(str(size) if size < _LUMPED else f"{size} to {2 * size - 1}", lumped[size]) for size in sorted(lumped)]


def _id(document: dict[str, Any]) -> str:
    return str(document.get("id", ""))  # URLs have none


def _examples(run: Path, steps: Mapping[str, tuple[str, str]], shards: int | None) -> list[Examples]:
    found = []
    for folder, (step, _) in steps.items():
        reasons: dict[str, list[dict[str, Any]]] = {}
        for part in statistics(run, folder, shards):
            for reason, documents in part.get("examples", {}).items():
                reasons.setdefault(reason, []).extend(documents)
        for reason, documents in sorted(reasons.items()):
            found.append(Examples(step, reason, sorted(documents, key=_id)[:_EXAMPLES]))
    return found


def corpus_figures(run: Path, steps: Mapping[str, tuple[str, str]] = STEPS, shards: int | None = None) -> Corpus:
    """The figures in the statistics of a run's `steps`; arguments as in `report.funnel.funnel`."""
    clean, dedup = statistics(run, "clean", shards), statistics(run, "dedup", shards)
    before, after = _sum(clean, "sizes_in"), _sum(dedup, "sizes_out")
    clusters = run / "dedup" / "clusters.json"
    figures = read_json(clusters) if clusters.exists() else {}
    sets: Counter[str] = Counter()
    touched: Counter[str] = Counter()
    for part in statistics(run, "decontaminate", shards) if "decontaminate" in steps else ():
        for name, counts in part.get("evaluation_sets", {}).items():
            sets[name] += counts["hits"]
            touched[name] += counts["documents"]
    return Corpus(
        languages=_sum(clean, "languages").most_common(),
        lengths=[(f"{int(size):,}", before[size], after[size]) for size in sorted({*before, *after}, key=int)],
        clusters=_cluster_sizes(figures.get("cluster_sizes", {})),
        largest=figures.get("largest_cluster"),
        evaluation_sets=[(name, sets[name], touched[name]) for name in sorted(sets)],
        examples=_examples(run, steps, shards),
    )
