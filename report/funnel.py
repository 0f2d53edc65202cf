"""The funnel: how many documents each corpus step kept, summed over its shards."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import read_json, shard_paths
from common.settings import Settings

# folder of the step below the run: (step, what it counts)
STEPS = {
    "urls": ("blacklist", "URLs"),
    "pages": ("scrape", "pages"),
    "ingest": ("ingest", "documents"),
    "clean": ("clean", "documents"),
    "dedup": ("dedup", "documents"),
    "decontaminate": ("decontaminate", "documents"),
    "tokens": ("tokenize", "documents"),
    "dataset": ("merge_index", "documents"),
}


@dataclass(frozen=True)
class Step:
    """One row of the funnel."""

    name: str
    unit: str
    documents_in: int
    documents_out: int
    bytes_out: int
    reasons: list[tuple[str, int]]
    """Dropped documents by reason, the most frequent first."""
    seconds: float
    """Sum over all shards."""
    tokens: int | None

    @property
    def share(self) -> float:
        """Share of the documents that were kept, 0 to 1."""
        return self.documents_out / self.documents_in if self.documents_in else 0.0


def configured_steps(settings: Settings) -> dict[str, tuple[str, str]]:
    """The part of STEPS that a configuration runs."""
    off = {"urls": not settings.urls, "pages": not settings.urls, "ingest": not settings.sources}
    off["decontaminate"] = not settings.decontaminate.files
    return {folder: step for folder, step in STEPS.items() if not off.get(folder)}


def statistics(run: Path, folder: str, shards: int | None = None) -> list[dict[str, Any]]:
    """The contents of a step's stats.json files: those of the first `shards` shards, or all that exist."""
    if shards is None:
        return [read_json(path) for path in sorted((run / folder).glob("*stats.json"))]
    paths = [run / folder / "stats.json", *shard_paths(run / folder, shards, ".stats.json")]
    return [read_json(path) for path in paths if path.is_file()]


def funnel(run: Path, steps: Mapping[str, tuple[str, str]] = STEPS, shards: int | None = None) -> list[Step]:
    """The `steps` of a run that have statistics, in the order of the DAG."""
    found = []
    for folder, (name, unit) in steps.items():
        parts = statistics(run, folder, shards)
        if not parts:
            continue
        reasons: Counter[str] = Counter()
        for shard in parts:
            reasons.update(shard["reasons"])
        found.append(
            Step(
                name=name,
                unit=unit,
                documents_in=sum(shard["documents_in"] for shard in parts),
                documents_out=sum(shard["documents_out"] for shard in parts),
                bytes_out=sum(shard["bytes_out"] for shard in parts),
                reasons=sorted(reasons.items(), key=lambda item: (-item[1], item[0])),
                seconds=sum(shard["seconds"] for shard in parts),
                tokens=sum(shard["tokens"] for shard in parts) if "tokens" in parts[0] else None,
            )
        )
    return found
