"""Batches of shards: which shards share a Slurm task, and the files that a batch consists of.

One batch is one sbatch call: an array of tasks, each with a list of shards. RUN/slurm/BATCH holds

    batch.sh          the script that Slurm runs
    run_batch.py      a copy of cluster/corpus_jobs/run_batch.py, which works on the list of a task
    batch.json        the job id (written when Slurm has accepted the batch), and what was asked
    0.json            the shards of task 0: commands, threads, logs
    0.results         what became of them, one line per event
    0.abandoned       exists if nobody waits for task 0: it then runs nothing

A batch whose shards have all been reported is removed, so what is found here when a run starts was
left by a Snakemake that died.
"""

import errno
import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from cluster.corpus_jobs.run_batch import read_events
from cluster.slurm import site_options
from common.console import QUIET
from common.files import naming, write_json
from common.settings import SiteSettings

FOLDER = "slurm"  # of a run
_RUNNER = Path(__file__).with_name("run_batch.py")


@dataclass(frozen=True)
class Shard:
    """The commands of a task for one job of the DAG."""

    key: str
    """A hash of its rule and outputs, the same over several runs of Snakemake."""
    label: str
    """Its name in messages: 0003, or the rule's name."""
    rule: str
    command: str
    shell: str
    threads: int
    logs: list[str]
    """Its log files, relative to the folder in which Snakemake runs."""
    context: str = ""
    """A hash of what its command depends on besides its text, see `context`."""


@dataclass(frozen=True)
class Request:
    """The Slurm request of a batch, per task. None: the site's default."""

    cpus: int
    mem_mb: int | None
    minutes: int | None
    gpus: int = 0
    model: str = ""
    """The model of a job with GPUs."""
    partition: str = ""
    """That of the rule, if it has one of its own."""


def key_of(rule: str, outputs: Iterable[object]) -> str:
    """A hash of a job's rule and outputs, which is its `Shard.key`."""
    return hashlib.sha256("\n".join([rule, *map(str, outputs)]).encode()).hexdigest()[:20]


def split(count: int, per_task: int, max_tasks: int) -> list[list[range]]:
    """Which of `count` shards each task of each batch works on.

    `per_task` is the number of shards per task; 0: as many as make one batch of at most `max_tasks`
    tasks.
    """
    per_task = per_task or -(-count // max_tasks)
    tasks = [range(first, min(first + per_task, count)) for first in range(0, count, per_task)]
    return [tasks[first : first + max_tasks] for first in range(0, len(tasks), max_tasks)]


@dataclass(eq=False)
class Task:
    """One task of a batch: its result file, and its state in the executor."""

    folder: Path
    index: int
    shards: list[Shard]
    request: Request
    job: str = ""
    """Slurm's id: ID_INDEX for a task of an array; empty if unknown."""
    node: str = ""
    """Where Slurm ran it last; empty if unknown."""
    working: bool = False
    """Whether it has begun, and not said that it left; one that was killed says nothing."""
    running: int | None = None
    """The shard that has started last, if it has not ended."""
    alone: bool = False
    """Whether `running` is the first shard of this start, and so had the whole time limit."""
    started: dict[int, float] = field(default_factory=dict)
    """When each shard started: seconds since the epoch by the clock of the file system."""
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The exit code, seconds and peak memory of each shard that has ended."""
    waiting: dict[int, Any] = field(default_factory=dict)
    """The jobs of the DAG that wait for its shards; None for one that is not ready yet."""
    missing: float | None = None
    """When it was first missing in Slurm's queue."""
    left_slurm: bool = False
    """Whether Slurm no longer knows it."""
    batch: list["Task"] = field(default_factory=list)
    """The tasks of its batch."""
    _offset: int = 0
    _start: int | None = None
    _first: bool = True

    def read(self) -> None:
        """Read what is new in the result file."""
        events, self._offset = read_events(str(self.folder / f"{self.index}.results"), self._offset)
        for event in events:
            if "begin" in event:
                if self._start is None:  # what sbatch printed may be another number, of a site's banner
                    _identify(self.batch, event["job"].partition("_")[0])
                self._start, self.working, self.running, self._first = event["begin"], True, None, True
            elif "left" in event:
                self.working = self.working and event["left"] != self._start
            elif "start" in event:
                self.running, self.alone, self._first = event["start"], self._first, False
                self.started[event["start"]] = event["time"]
            elif "unstarted" in event:
                self.running = None
                del self.started[event["unstarted"]]
            elif "end" in event:
                self.running = None
                self.ended[event["end"]] = event

    @property
    def array(self) -> str:
        """Slurm's id of its batch; empty if unknown."""
        return self.job.partition("_")[0]

    @property
    def log(self) -> Path:
        """The log of the task and of Slurm itself."""
        return self.folder.parent.parent / "logs" / FOLDER / f"{self.folder.name}_{self.index}.log"

    @property
    def done(self) -> bool:
        """Whether no job waits for it and Slurm does not need its files."""
        return not self.waiting and (self.left_slurm or len(self.ended) == len(self.shards))

    @property
    def foreign(self) -> bool:
        """Whether another user has submitted it."""
        return self.folder.stat().st_uid != os.getuid()

    @property
    def abandoned(self) -> bool:
        """Whether it was abandoned."""
        return self._abandoned.exists()

    def abandon(self) -> None:
        """Stop it within seconds, or before its first shard if Slurm starts it later."""
        try:
            self._abandoned.touch()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # then it cannot record a start, and so starts nothing
                raise

    @property
    def _abandoned(self) -> Path:
        return self.folder / f"{self.index}.abandoned"


def context(environment: Mapping[str, str]) -> str:
    """A hash of the settings, the Python and the folder that commands depend on."""
    settings = sorted(
        (name, value) for name, value in environment.items() if name.startswith("URLS_TO_GPT2_") and name != QUIET
    )
    return hashlib.sha256(json.dumps([settings, sys.executable, os.getcwd()]).encode()).hexdigest()[:16]


def title(rules: Sequence[str]) -> str:
    """The rule of a batch, or the common part of its rules' names, such as dedup_bands."""
    return rules[0] if len(set(rules)) == 1 else os.path.commonprefix(rules).rstrip("_0123456789") or "corpus"  # noqa: RUF071


def write_batch(
    run: Path,
    shards: Sequence[Shard],
    parts: Sequence[range],
    request: Request,
    site: SiteSettings,
    avoided: Iterable[str] = (),
) -> list[Task]:
    """Write the files of a batch, one task per part of `shards`; returns its tasks.

    `avoided`: nodes to exclude.
    """
    name, parent = title([shard.rule for shard in shards]), run.absolute() / FOLDER
    folder = parent / f"{name}.{time.strftime('%Y%m%d-%H%M%S')}.{uuid4().hex[:8]}"
    folder.mkdir(parents=True)  # with the user's permissions: another member of the group may continue the run
    tasks = _tasks(folder, [[shards[number] for number in part] for part in parts], request)
    try:
        with naming(folder):
            for task in tasks:
                content = json.dumps([asdict(shard) for shard in task.shards])
                (folder / f"{task.index}.json").write_text(content, encoding="utf-8")
                (folder / f"{task.index}.results").touch()
            shutil.copyfile(_RUNNER, folder / _RUNNER.name)
            tasks[0].log.parent.mkdir(parents=True, exist_ok=True)
            (folder / "batch.sh").write_text(_script(tasks, f"{run.name}.{name}", site, avoided), encoding="utf-8")
            accepted(tasks, "")
    except OSError:
        remove(folder)
        raise
    return tasks


def _tasks(folder: Path, lists: Iterable[list[Shard]], request: Request) -> list[Task]:
    """The tasks of a batch, one per list of shards."""
    tasks = [Task(folder, index, shards, request) for index, shards in enumerate(lists)]
    for task in tasks:
        task.batch = tasks
    return tasks


def _script(tasks: Sequence[Task], name: str, site: SiteSettings, avoided: Iterable[str]) -> str:
    """The batch script."""
    request, folder = tasks[0].request, tasks[0].folder
    log = str(tasks[0].log).replace("%", "%%")
    if len(tasks) > 1:
        log = log.removesuffix("_0.log") + "_%a.log"
    options = [
        f"--job-name={name}",
        *([f"--array=0-{len(tasks) - 1}"] if len(tasks) > 1 else []),
        f"--output={log}",
        "--open-mode=append",
        f"--chdir={Path.cwd()}",
        "--requeue",
        f"--cpus-per-task={request.cpus}",
        *([f"--mem={request.mem_mb}"] if request.mem_mb else []),
        *([f"--time={request.minutes}"] if request.minutes else []),
        *site_options(site, avoided),
    ]
    runner = shlex.join([sys.executable, "-IS", str(folder / _RUNNER.name), str(folder)])
    lines = [f"#SBATCH {shlex.quote(option)}" for option in options]
    return "\n".join(["#!/bin/bash", *lines, *site.setup, f"exec {runner}", ""])


def accepted(tasks: Sequence[Task], job: str) -> None:
    """Record that Slurm has accepted a batch as `job`; empty: not yet."""
    record = {"job": job, "tasks": len(tasks), "request": asdict(tasks[0].request)}
    write_json(tasks[0].folder / "batch.json", record)
    _identify(tasks, job)


def _identify(tasks: Sequence[Task], job: str) -> None:
    """Set Slurm's ids of the tasks of a batch that it has accepted as `job`."""
    for task in tasks if job else ():
        task.job = f"{job}_{task.index}" if len(tasks) > 1 else job


def recorded(run: Path) -> Iterator[Task]:
    """The tasks of all batches with unreported shards, the newest batch last."""
    records = []
    for path in (run.absolute() / FOLDER).glob("*/batch.json"):
        with suppress(OSError):  # Snakemake has just removed it: all its shards are reported
            records.append((path.stat().st_mtime, path.parent))
    for _, folder in sorted(records):
        try:
            record = json.loads((folder / "batch.json").read_text(encoding="utf-8"))
            files = [folder / f"{index}.json" for index in range(record["tasks"])]
            lists = [[Shard(**shard) for shard in json.loads(path.read_text(encoding="utf-8"))] for path in files]
            tasks = _tasks(folder, lists, Request(**record["request"]))
            _identify(tasks, record["job"])
            for task in tasks:
                task.read()
        except (OSError, ValueError, KeyError, TypeError):
            continue  # Snakemake died, or another one is at work, before the batch was complete: Slurm does not have it
        yield from tasks


def remove_if_done(task: Task) -> None:
    """Remove the files of a task's batch if they are no longer needed."""
    if all(one.done for one in task.batch):
        remove(task.folder)


def remove(folder: Path) -> None:
    """Remove the files of a batch, and the folder of all batches if it is empty."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
