"""The live table of `python -m cluster.status --watch`: corpus shards, jobs, training, disk used.

A refresh reads the files of the run folders and calls squeue once, for all jobs of all runs together; it never calls
sacct. The disk space is measured by a thread of its own, because counting a million files takes longer than a refresh.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cluster import slurm
from cluster.corpus_progress import CorpusTasks, StepProgress, corpus_progress
from cluster.jobs import SILENT, Job, look, read_job
from cluster.slurm import QueuedJob
from cluster.training_status import ALIGN, COLUMNS, model_status, row
from common.config import load_settings
from common.errors import ConfigError, InputError
from common.settings import Settings
from common.tables import readable_bytes, text_table

INTERVAL = 5.0
"""Seconds between two refreshes."""
_MEASURE = 60.0  # seconds between two measurements of the disk space
_BAR = 20  # characters
_STEP_COLUMNS = ("step", "", "done", "running", "queued", "failed", "ETA")


@dataclass(frozen=True)
class Watched:
    """A run folder, or the model folders of one that were named."""

    folder: Path
    models: list[Path] | None = None
    """None: the whole run, with its corpus."""


def find(folders: Sequence[Path]) -> list[Watched]:
    """The runs and models that folders stand for: by default, every run below results/. Raises InputError for none."""
    if not folders:
        found = [path for path in sorted(Path("results").glob("*")) if _is_run(path)]
        if not found:
            raise InputError("results/*: no run yet; start one with snakemake, or name its folder")
        return [Watched(path) for path in found]
    runs = [Watched(path) for path in folders if _is_run(path)]
    models: dict[Path, list[Path]] = {}
    for path in folders:
        if not _is_run(path):
            models.setdefault(path.absolute().parent.parent, []).append(path)
    return [*runs, *(Watched(run, named) for run, named in models.items())]


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "models").is_dir()


def watch(folders: Sequence[Path]) -> int:
    """Draw the table until Ctrl-C; returns the exit code. Where stdout is no terminal, print it once."""
    watched = find(folders)
    if not sys.stdout.isatty():
        print(table(watched, {one.folder: disk_used(one.folder) for one in watched}))
        return 0
    used: dict[Path, int] = {}
    threading.Thread(target=_measure, args=(watched, used), daemon=True).start()
    try:
        with Live(console=Console(), auto_refresh=False) as live:
            while True:
                now = f"{datetime.now():%H:%M:%S}, every {INTERVAL:.0f} s; Ctrl-C ends this table, not the jobs"
                live.update(Text(f"{table(watched, used)}\n\n{now}", no_wrap=True, overflow="ellipsis"), refresh=True)
                time.sleep(INTERVAL)
    except KeyboardInterrupt:
        return 130


def _measure(watched: Sequence[Watched], used: dict[Path, int]) -> None:
    while True:
        for one in watched:
            used[one.folder] = disk_used(one.folder)
        time.sleep(_MEASURE)


def table(watched: Sequence[Watched], used: Mapping[Path, int]) -> str:
    """All runs as text. `used`: bytes on disk by run folder, if they have been measured."""
    configured = {one.folder: _settings(one.folder) for one in watched}
    tasks = {one.folder: CorpusTasks.of(one.folder.absolute()) for one in watched if one.models is None}
    models = {one.folder: _models(one, configured[one.folder]) for one in watched}
    jobs = {path: read_job(path) for found in models.values() for path in found}
    known, remark = _ask([job for job in jobs.values() if job], [id for one in tasks.values() for id in one.job_ids()])
    blocks = []
    for one in watched:
        settings, parts = configured[one.folder], list[str]()
        if settings is not None and one.models is None:
            parts.append(_steps_table(corpus_progress(settings, tasks[one.folder], known["slurm"])))
        rows = [_model_row(path, jobs[path], known) for path in models[one.folder]]
        if rows:
            parts.append(text_table([("model", *COLUMNS[1:]), *rows], ALIGN))
        size = f"{readable_bytes(used[one.folder])} on disk" if one.folder in used else "measuring the disk space"
        blocks.append("\n\n".join([f"{one.folder}: {size}", *filter(None, parts)]))
    return "\n\n\n".join([*blocks, *filter(None, [remark])])


def _settings(run: Path) -> Settings | None:
    """The resolved settings of a run, with the folder by which it is known here; None if there are none to read."""
    try:
        return load_settings(run / "config.yaml").model_copy(update={"run": run})
    except (ConfigError, InputError, OSError):
        return None


def _models(one: Watched, settings: Settings | None) -> list[Path]:
    """The model folders to show: those that exist, and those that the run will train."""
    if one.models is not None:
        return one.models
    existing = [path for path in sorted((one.folder / "models").glob("*")) if path.is_dir()]
    planned = [settings.model_folder(name) for name in settings.train_models] if settings else []
    return list(dict.fromkeys([*planned, *existing]))


def _ask(jobs: Sequence[Job], arrays: Sequence[str]) -> tuple[dict[str, Mapping[str, QueuedJob] | None], str]:
    """What is known of all jobs, by executor, after one call of squeue; and a remark if Slurm does not answer."""
    local = look([job for job in jobs if job.executor == "local"])
    ids, remark = [*(job.id for job in jobs if job.executor == "slurm"), *arrays], ""
    try:
        queued = slurm.queue(ids)
    except InputError as error:  # not a login node
        queued, remark = None, str(error)
    if queued is None:
        return {"local": local, "slurm": None}, f"{remark or SILENT}; states are those of the files"
    return {"local": local, "slurm": {job.id: job for job in queued}}, ""


def _model_row(folder: Path, job: Job | None, known: Mapping[str, Mapping[str, QueuedJob] | None]) -> list[str]:
    status = model_status(folder, job, known[job.executor] if job else None)
    if not folder.is_dir():
        status["state"] = "not started"
    return [folder.name, *row(status)[1:]]


def _steps_table(steps: Sequence[StepProgress]) -> str:
    rows = [
        (
            step.name,
            _bar(step.done, step.total),
            f"{step.done:,}/{step.total:,}",
            *(f"{count:,}" if count else "-" for count in (step.running, step.queued, step.failed)),
            "-" if step.seconds_left is None else str(timedelta(seconds=math.ceil(step.seconds_left))),
        )
        for step in steps
    ]
    return text_table([_STEP_COLUMNS, *rows], "llrrrrr") if rows else ""


def _bar(done: int, total: int) -> str:
    filled = _BAR * done // max(total, 1)
    return "█" * filled + "░" * (_BAR - filled)


def disk_used(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk; files that vanish meanwhile count as none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue
    return total
