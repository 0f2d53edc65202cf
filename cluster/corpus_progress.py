"""How far the corpus of a run is: finished shards per step, from the files of the run folder.

A step's output appears whole or not at all, so a file that exists is a shard that is done; one of an earlier
configuration counts until Snakemake makes it again. Deduplication removes the signatures at its end; clusters.json then
stands for all of them.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.corpus_jobs import batches
from cluster.slurm import QueuedJob
from common.settings import Settings

_RECENT = 200  # finished shards over which the speed of a step is averaged


@dataclass(frozen=True)
class StepProgress:
    """A step of the corpus."""

    name: str
    done: int
    total: int
    running: int = 0
    """Shards that a Slurm task, or a process of this machine, works on."""
    queued: int = 0
    """Shards in tasks that wait for Slurm."""
    failed: int = 0
    """Shards whose command failed in a task whose batch is still here: they are tried again."""
    seconds_left: float | None = None


@dataclass(frozen=True)
class _Step:
    name: str
    folder: str
    pattern: str
    """Of the files that stand for one finished shard each."""
    total: int
    whole: str = ""
    """A file of the run that stands for all shards."""


def _steps(settings: Settings) -> Iterator[_Step]:
    """The steps that a configuration runs, in the order of the DAG."""
    shards, documents = settings.shards, r"\d+\.jsonl\.zst"
    if settings.urls:
        yield _Step("blacklist", "urls", r"stats\.json", 1)
        yield _Step("scrape", "pages", documents, shards)
    if settings.sources:
        yield _Step("ingest", "ingest", r"stats\.json", 1)
    yield _Step("clean", "clean", documents, shards)
    yield _Step("dedup signatures", "dedup/work", r"\d+\.signatures", shards, whole="dedup/clusters.json")
    yield _Step("dedup clusters", "dedup", r"clusters\.json", 1)
    yield _Step("dedup", "dedup", documents, shards)
    if settings.decontaminate.files:
        yield _Step("decontaminate count", "decontaminate", r"\d+\.counts\.json", shards)
        yield _Step("decontaminate", "decontaminate", documents, shards)
    if settings.train_tokenizer.vocab_size:
        yield _Step("train_tokenizer", "tokenizer", r"stats\.json", 1)
    yield _Step("tokenize", "tokens", r"\d+_text_document\.idx", shards)
    yield _Step("merge_index", "dataset", r"stats\.json", 1)


@dataclass(frozen=True)
class CorpusTasks:
    """The Slurm tasks of a run that have not all been reported, from the files of its batches."""

    tasks: list[batches.Task]

    @classmethod
    def of(cls, run: Path) -> "CorpusTasks":
        """Those of a run folder."""
        return cls(list(batches.left_over(run)) if (run / batches.FOLDER).is_dir() else [])

    def job_ids(self) -> list[str]:
        """What squeue is asked for: the arrays, each once."""
        return sorted({task.job.partition("_")[0] for task in self.tasks if task.job})

    def count(self, known: Mapping[str, QueuedJob] | None) -> dict[str, tuple[int, int, int]]:
        """By rule: shards that run, that wait, and that failed. Without an answer of Slurm, what the files tell."""
        counts: dict[str, list[int]] = {}
        for task in self.tasks:
            job = known.get(task.job) if known is not None else None
            active = known is None or (job is not None and job.active)
            waits = active and job is not None and job.state == "PENDING"
            for number, shard in enumerate(task.shards):
                count = counts.setdefault(rule_title(shard.rule), [0, 0, 0])
                if number in task.ended:
                    count[2] += task.ended[number]["exit"] != 0
                elif active and number == task.running and not waits:
                    count[0] += 1
                elif active:
                    count[1] += 1
        return {rule: (running, queued, failed) for rule, (running, queued, failed) in counts.items()}


def rule_title(rule: str) -> str:
    """The name of a rule as the table shows it: `dedup signatures` for dedup_signatures, one for all dedup_bands_N."""
    name = re.sub(r"_\d+$", "", rule)
    if name.startswith(("dedup_bands", "dedup_verify", "dedup_clusters")):
        return "dedup clusters"
    return {"dedup_signatures": "dedup signatures", "decontaminate_count": "decontaminate count"}.get(name, name)


def corpus_progress(
    settings: Settings, tasks: CorpusTasks, known: Mapping[str, QueuedJob] | None = None
) -> list[StepProgress]:
    """Every step of a run's corpus; none for a configuration without documents of its own.

    `known`: what squeue said about the tasks, by id.
    """
    if not settings.urls and not settings.sources:
        return []
    counts, here = tasks.count(known), running_here(settings.run)
    found = []
    for step in _steps(settings):
        folder = settings.run / step.folder
        names = _matching(folder, step)
        done = step.total if step.whole and (settings.run / step.whole).exists() else len(names)
        left = _seconds_left([folder / name for name in names], step.total) if 0 < done < step.total else None
        running, queued, failed = counts.get(step.name, (0, 0, 0))
        running = max(running, here[step.name])  # a node of the cluster knows the same shards twice
        found.append(StepProgress(step.name, done, step.total, running, queued, failed, left))
    return found


def running_here(run: Path) -> Counter[str]:
    """By step: the logs that a process of this user on this machine writes to; none where there is no /proc."""
    logs = run.resolve() / "logs"
    open_logs = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # it has ended, belongs to somebody else, or writes elsewhere
            open_logs.add((process / "fd/1").readlink().relative_to(logs))
    return Counter(rule_title(path.parts[0].removesuffix(".log")) for path in open_logs)


def _matching(folder: Path, step: _Step) -> list[str]:
    """The files that stand for finished shards; an earlier configuration may have had more shards."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    fits = re.compile(step.pattern).fullmatch
    return [name for name in names if fits(name) and (step.total == 1 or int(name[: _digits(name)]) < step.total)]


def _digits(name: str) -> int:
    return len(name) - len(name.lstrip("0123456789"))


def _seconds_left(paths: list[Path], total: int) -> float | None:
    """From the pace of the newest files; None until there are two."""
    times = []
    for path in paths:
        try:
            times.append(path.stat().st_mtime)
        except OSError:  # removed since
            continue
    newest = sorted(times)[-_RECENT:]
    if len(newest) < 2:
        return None
    span = max(time.time() - newest[0], 0.001)
    return (total - len(paths)) * span / (len(newest) - 1)
