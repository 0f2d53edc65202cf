"""The funnel: what each corpus step kept and dropped, summed over its shards; every stats.json is read once."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
_EXAMPLES = 10  # kept per reason


@dataclass
class Step:
    """One step of the funnel."""

    name: str
    unit: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    tokens: int | None = None
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """`reasons`, `languages`, `sizes_in`, `sizes_out`, and `hosts` (URLs by host), each by name."""
    evaluation_sets: dict[str, Counter[str]] = field(default_factory=dict)
    """`hits` and `documents` by evaluation set."""
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Dropped documents by reason: those with the smallest ids, for a reproducible sample."""
    libraries: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """Sum over all shards."""

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
        self.bytes_in += shard["bytes_in"]
        self.bytes_out += shard["bytes_out"]
        if "tokens" in shard:
            self.tokens = (self.tokens or 0) + shard["tokens"]
        hosts = {host: counts["urls"] for host, counts in shard.get("hosts", {}).items()}
        for name in ("reasons", "languages", "sizes_in", "sizes_out"):
            self.counts.setdefault(name, Counter()).update(shard.get(name, {}))
        self.counts.setdefault("hosts", Counter()).update(hosts)
        for name, counts in shard.get("evaluation_sets", {}).items():
            found = self.evaluation_sets.setdefault(name, Counter())
            found.update(hits=counts["hits"], documents=counts["documents"])
        for reason, documents in shard.get("examples", {}).items():
            both = [*self.examples.get(reason, []), *documents]
            self.examples[reason] = sorted(both, key=_id)[:_EXAMPLES]
        self.libraries.update(shard.get("libraries", {}))
        self.seconds += shard["seconds"]


def _id(document: Mapping[str, Any]) -> str:
    return str(document.get("id", ""))  # URLs have none


def configured_steps(settings: Settings) -> dict[str, tuple[str, str]]:
    """The part of STEPS that a configuration runs."""
    off = {"urls": not settings.urls, "pages": not settings.urls, "ingest": not settings.sources}
    off["decontaminate"] = not settings.decontaminate.files
    return {folder: step for folder, step in STEPS.items() if not off.get(folder)}


def _statistics(run: Path, folder: str, shards: int | None) -> Iterator[Path]:
    """A step's stats.json files: those of the first `shards` shards, or all that exist."""
    if shards is None:
        yield from sorted((run / folder).glob("*stats.json"))
        return
    paths = [run / folder / "stats.json", *shard_paths(run / folder, shards, ".stats.json")]
    yield from (path for path in paths if path.is_file())


def funnel(run: Path, steps: Mapping[str, tuple[str, str]] = STEPS, shards: int | None = None) -> list[Step]:
    """The `steps` of a run that have statistics, in the order of the DAG."""
    found = []
    for folder, (name, unit) in steps.items():
        step, paths = Step(name, unit), list(_statistics(run, folder, shards))
        for path in paths:
            step.add(read_json(path))
        if paths:
            found.append(step)
    return found
