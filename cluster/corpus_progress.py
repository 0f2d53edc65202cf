"""The progress of a run's corpus: finished shards per step, from the files of the run folder.

A step's output appears whole or not at all, so a file that exists is a shard that is done; one of an earlier
configuration counts until Snakemake makes it again.
"""

import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from cluster.corpus_jobs.batches import Task
from cluster.slurm import QueuedJob
from common import steps
from common.console import text_table
from common.settings import Settings
from common.steps import Step

_STATES = ("running", "queued", "failed")  # of shards in Slurm
_COLUMNS = ("step", "", "done", *_STATES, "ETA")
_BAR = 20  # characters
_RECENT = 200  # finished shards over which the speed of a step is averaged


def steps_table(settings: Settings, tasks: Iterable[Task], known: Mapping[str, QueuedJob] | None) -> str:
    """A row per step of a run's corpus; empty for a configuration without documents of its own.

    `tasks`: those of Slurm that have not all been reported; `known`: what squeue said about them, by id.
    """
    counts, rows = _in_slurm(tasks, known), []
    for step in steps.configured(settings):
        results = _results(settings, step)
        total = settings.shards if "{shard}" in step.file else 1
        done = len(results)
        left = _seconds_left(results, total) if 0 < done < total else None
        filled = _BAR * done // max(total, 1)
        rows.append(
            (
                step.name,
                "█" * filled + "░" * (_BAR - filled),
                f"{done:,}/{total:,}",
                *(f"{counts[step.name, state]:,}" if counts[step.name, state] else "-" for state in _STATES),
                "-" if left is None else str(timedelta(seconds=math.ceil(left))),
            )
        )
    return text_table([_COLUMNS, *rows], "llrrrrr") if rows else ""


def _in_slurm(tasks: Iterable[Task], known: Mapping[str, QueuedJob] | None) -> Counter[tuple[str, str]]:
    """Shards by (step, running, queued or failed). If Slurm does not answer, from the files."""
    counts: Counter[tuple[str, str]] = Counter()
    for task in tasks:
        job = known.get(task.job) if known is not None else None
        active = known is None or (job is not None and job.active)
        waits = job is not None and job.state == "PENDING"
        for number, shard in enumerate(task.shards):
            step = steps.of_rule(shard.rule)
            if number in task.ended:
                counts[step, "failed"] += task.ended[number]["exit"] != 0
            elif active:
                counts[step, "running" if number == task.running and not waits else "queued"] += 1
    return counts


def _results(settings: Settings, step: Step) -> list[Path]:
    """The files that stand for finished shards; an earlier configuration may have had more shards."""
    folder = settings.run / step.folder
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    fits = re.compile(re.escape(step.file).replace(r"\{shard\}", r"(\d+)")).fullmatch
    found = [(folder / name, match) for name in names if (match := fits(name))]
    return [path for path, match in found if not match.groups() or int(match[1]) < settings.shards]


def _seconds_left(paths: list[Path], total: int) -> float | None:
    """From the pace of the newest files; None until there are two."""
    times = []
    for path in paths:
        with suppress(OSError):  # removed since
            times.append(path.stat().st_mtime)
    newest = sorted(times)[-_RECENT:]
    if len(newest) < 2:
        return None
    span = max(time.time() - newest[0], 0.001)
    return (total - len(paths)) * span / (len(newest) - 1)
