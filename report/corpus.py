"""What the corpus is made of: languages, lengths, clusters of duplicates, and examples of what was dropped."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import read_json
from common.settings import Settings
from report.funnel import statistics

_EXAMPLES = 10  # shown of each reason
_LUMPED = 4  # cluster sizes from here are lumped by powers of two


@dataclass(frozen=True)
class Examples:
    """Documents that a step dropped for one reason: those with the smallest ids, so the same ones each time."""

    step: str
    reason: str
    documents: list[dict[str, Any]]


@dataclass(frozen=True)
class Corpus:
    """Each part is empty where the steps that know it have not run."""

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


def _examples(run: Path, steps: dict[str, str], settings: Settings | None) -> list[Examples]:
    found = []
    for folder, step in steps.items():
        reasons: dict[str, list[dict[str, Any]]] = {}
        for part in statistics(run, folder, settings):
            for reason, documents in part.get("examples", {}).items():
                reasons.setdefault(reason, []).extend(documents)
        for reason, documents in sorted(reasons.items()):
            found.append(Examples(step, reason, sorted(documents, key=_id)[:_EXAMPLES]))
    return found


def corpus(run: Path, steps: dict[str, str], settings: Settings | None = None) -> Corpus:
    """What the statistics of a run say; `steps` are its folders and the steps that wrote them."""
    clean, dedup = statistics(run, "clean", settings), statistics(run, "dedup", settings)
    before, after = _sum(clean, "sizes_in"), _sum(dedup, "sizes_out")
    clusters = run / "dedup" / "clusters.json"
    figures = read_json(clusters) if clusters.exists() else {}
    sets: Counter[str] = Counter()
    touched: Counter[str] = Counter()
    for part in statistics(run, "decontaminate", settings):
        for name, counts in part.get("evaluation_sets", {}).items():
            sets[name] += counts["hits"]
            touched[name] += counts["documents"]
    return Corpus(
        languages=_sum(clean, "languages").most_common(),
        lengths=[(f"{int(size):,}", before[size], after[size]) for size in sorted({*before, *after}, key=int)],
        clusters=_cluster_sizes(figures.get("cluster_sizes", {})),
        largest=figures.get("largest_cluster"),
        evaluation_sets=[(name, sets[name], touched[name]) for name in sorted(sets)],
        examples=_examples(run, steps, settings),
    )
