"""The funnel: what each corpus step let through, summed over its shards."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import read_json
from common.settings import Settings

# folder of the step below the run, what it counts
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
    """Dropped by reason, most frequent first."""
    seconds: float
    """Summed over shards."""
    tokens: int | None

    @property
    def share(self) -> float:
        """Part that survived, 0 to 1."""
        return self.documents_out / self.documents_in if self.documents_in else 0.0


def statistics(run: Path, folder: str, settings: Settings | None = None) -> list[dict[str, Any]]:
    """What the shards of a step counted: those that the configuration of the run names, or all that are there."""
    if settings is None:
        return [read_json(path) for path in sorted((run / folder).glob("*stats.json"))]
    off = {"urls": not settings.urls, "pages": not settings.urls, "ingest": not settings.sources}
    off["decontaminate"] = not settings.decontaminate.files
    if off.get(folder):
        return []
    names = ["stats.json", *(f"{shard:04d}.stats.json" for shard in range(settings.shards))]
    return [read_json(path) for name in names if (path := run / folder / name).is_file()]


def funnel(run: Path, settings: Settings | None = None) -> list[Step]:
    """The steps of a run that have left their statistics, in the order of the DAG."""
    steps = []
    for folder, (name, unit) in STEPS.items():
        shards = statistics(run, folder, settings)
        if not shards:
            continue
        reasons: Counter[str] = Counter()
        for shard in shards:
            reasons.update(shard["reasons"])
        steps.append(
            Step(
                name=name,
                unit=unit,
                documents_in=sum(shard["documents_in"] for shard in shards),
                documents_out=sum(shard["documents_out"] for shard in shards),
                bytes_out=sum(shard["bytes_out"] for shard in shards),
                reasons=sorted(reasons.items(), key=lambda item: (-item[1], item[0])),
                seconds=sum(shard["seconds"] for shard in shards),
                tokens=sum(shard["tokens"] for shard in shards) if "tokens" in shards[0] else None,
            )
        )
    return steps
