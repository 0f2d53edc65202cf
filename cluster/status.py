"""Show runs: shards per corpus step; state, iteration, losses and speed per training.

    python -m cluster.status
    python -m cluster.status results/demo --watch
    python -m cluster.status results/demo/models/tiny --json

Without a folder it shows every run below results/. One squeue call covers all of them; if Slurm
does not answer, states come from the files. --watch redraws the table every 5 seconds, until
Ctrl-C.
"""

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

import orjson

from cluster import slurm
from cluster.corpus_jobs import batches
from cluster.corpus_jobs.batches import Task
from cluster.elastic import Sizes
from cluster.jobs import Job, current_state, log_path, query_jobs, read_job, require_folder, total_iterations
from cluster.slurm import SILENT, UNKNOWN, QueuedJob
from common import cli, steps
from common.config import load_settings
from common.console import note, text_table
from common.errors import ConfigError, InputError, ToolkitError
from common.files import read_json, read_rows, shard_name
from common.settings import Settings
from common.steps import Step
from training.model_folder import newest_iteration
from training.monitoring.heartbeat import progress_of

COLUMNS = (
    "model folder", "state", "job", "nodes", "iteration", "loss", "valid loss", "tokens/s", "ETA", "restarts"
)  # fmt: skip
ALIGN = "llllrrrrrr"
_LONGEST_REASON = 60  # characters in the table; --json has all of it
INTERVAL = 5.0
"""Seconds between two refreshes."""
_STATES = ("running", "queued", "failed")  # of shards in Slurm
_STEP_COLUMNS = ("step", "", "done", *_STATES, "ETA")
_BAR = 20  # characters
_RECENT = 200  # finished shards over which the speed of a step is averaged


def overview(runs: Sequence[Path], models: Sequence[Path]) -> tuple[str, list[dict[str, Any]], str]:
    """Tables, the status of each model folder, and a remark if Slurm does not answer."""
    settings = {run: _settings(run) for run in runs}
    tasks = {run: list(batches.recorded(run)) for run in runs}
    run_models = {run: _models(run, settings[run]) for run in runs}
    jobs = {path: read_job(path) for path in chain(models, *run_models.values())}
    arrays = {task.array for task in chain(*tasks.values()) if task.job}
    known, remark = _query([job for job in jobs.values() if job], sorted(arrays))
    statuses = {path: model_status(path, job, known) for path, job in jobs.items()}

    def trainings(paths: Sequence[Path], heading: str) -> str:
        """The table of some trainings; `heading`: of the first column, folders or names."""
        rows = [[str(path) if heading == COLUMNS[0] else path.name, *row(statuses[path])] for path in paths]
        spikes = [(path.name, statuses[path]["spikes"], ", ".join(statuses[path]["worst"][:3])) for path in paths]
        spiked = [f"{name}: spikes {n}, last in {worst or 'every sample'}" for name, n, worst in spikes if n]
        return "\n".join([text_table([(heading, *COLUMNS[1:]), *rows], ALIGN), *spiked]) if rows else ""

    blocks = [trainings(models, COLUMNS[0])]
    for run in runs:
        loaded = settings[run]
        corpus = steps_table(loaded, tasks[run], known) if loaded else ""
        base = f" extends {', '.join(map(str, loaded.base))}" if loaded and loaded.base else ""
        blocks.append("\n\n".join(filter(None, [f"{run}{base}:", corpus, trainings(run_models[run], "model")])))
    existing = [status for path, status in statuses.items() if path.is_dir()]
    return "\n\n\n".join(filter(None, blocks)), existing, remark


def _query(jobs: Sequence[Job], arrays: Sequence[str]) -> tuple[Mapping[str, QueuedJob], str]:
    """The jobs and arrays that are known, by id, and a remark if Slurm does not answer."""
    try:
        known, remark = query_jobs(jobs, arrays), SILENT
    except InputError as error:  # not a login node
        known, remark = query_jobs([job for job in jobs if job.executor == "local"]), str(error)
        known |= slurm.unknown([*(job.id for job in jobs if job.executor == "slurm"), *arrays])
    silent = any(job.state == UNKNOWN and job.reason == SILENT for job in known.values())
    return known, f"{remark}; states are those of the files" if silent else ""


def _models(run: Path, settings: Settings | None) -> list[Path]:
    """The model folders of a run, planned or existing."""
    existing = [path for path in sorted((run / "models").glob("*")) if path.is_dir()]
    planned = [settings.model_folder(name) for name in settings.models_of_all] if settings else []
    return list(dict.fromkeys([*planned, *existing]))


def _settings(run: Path) -> Settings | None:
    """The resolved settings of a run, with the path as given; None if they cannot be read."""
    try:
        return load_settings(run / "config.yaml").model_copy(update={"run": run})
    except (ConfigError, InputError, OSError):
        return None


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "models").is_dir()


def model_status(folder: Path, job: Job | None, known: Mapping[str, QueuedJob]) -> dict[str, Any]:
    """The status of a model folder: losses in nats, times in seconds, None for unknown values."""
    done = folder / "done.json"
    train, valid = ((read_rows(folder / f"{name}.csv") or [{}])[-1] for name in ("train", "valid"))
    iteration, total = _number(train.get("iteration")), total_iterations(folder, job)
    iteration = max(iteration or 0, newest_iteration(folder)) or None  # checkpoints may be newer than the last row
    state = "finished" if done.exists() else "no job" if folder.is_dir() else "not started"
    status: dict[str, Any] = {"folder": str(folder), "state": state, "reason": ""}
    status |= {"job": None, "executor": None, "nodes": None, "restarts": None, "log": None}
    if job is not None:
        queued = known.get(job.id)
        current = current_state(folder, job, queued)
        reason = "" if current.reason in ("None", SILENT) else current.reason
        status |= {"state": current.state, "reason": reason, "job": job.id, "executor": job.executor}
        status |= {"nodes": (queued and queued.nodes) or None, "restarts": current.restarts, "log": str(log_path(job))}
    if status["state"] == "finished":
        with suppress(InputError, KeyError):
            iteration = read_json(done)["iteration"]
    beat, loss = progress_of(folder), _number(train.get("lm_loss"))
    if beat and beat["done"] > (iteration or 0):
        iteration, loss = beat["done"], _number(beat.get("loss"))
    if job is not None and status["state"] == "running":
        hangs = f"hangs in {beat['hangs_in']}" if "hangs_in" in beat else ""
        status["reason"] = hangs or _fewer_nodes(folder, job) or status["reason"]
    spikes = sorted((folder / "blame").glob("iter_*.json"))
    return status | {
        "spikes": len(spikes),
        "worst": read_json(spikes[-1])["worst"] if spikes else [],
        "iteration": None if iteration is None else int(iteration),
        "iterations": total,
        "loss": loss,
        "valid_loss": _number(valid.get("loss")),
        "tokens_per_second": _number(train.get("tokens_per_second")),
        "mfu": _number(train.get("mfu")),
        "seconds_left": beat.get("seconds_left") if status["state"] == "running" else None,
    }


def _fewer_nodes(folder: Path, job: Job) -> str:
    """`3 of 4 nodes, 25 % slower than planned` if the last start had fewer than all; else empty."""
    starts = read_rows(folder / "starts.csv")
    with suppress(ToolkitError, KeyError, ValueError):
        return Sizes.of(job, folder.name).describe(int(starts[-1]["processes"])) if starts else ""
    return ""


def _number(cell: str | float | None) -> float | None:
    """The number in a CSV cell; None if the cell is empty, missing, or not a finite number."""
    try:
        number = float(cell or "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def row(status: Mapping[str, Any]) -> list[str]:
    """The cells of a model folder, without that of the first column."""
    iteration, total, left = status["iteration"], status["iterations"], status["seconds_left"]
    reason = shorten(status["reason"], _LONGEST_REASON, placeholder=" …")
    return [
        f"{status['state']} ({reason})" if reason else status["state"],
        status["job"] or "-",
        status["nodes"] or "-",
        "-" if iteration is None else f"{iteration}/{total or '?'}",
        _figure(status["loss"], ".4f"),
        _figure(status["valid_loss"], ".4f"),
        _figure(status["tokens_per_second"], ".0f"),
        "-" if left is None else str(timedelta(seconds=math.ceil(left))),
        _figure(status["restarts"], "d"),
    ]


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def steps_table(settings: Settings, tasks: Iterable[Task], known: Mapping[str, QueuedJob]) -> str:
    """A row per step of a run's corpus; empty for a configuration without documents of its own.

    A step's output appears whole or not at all, so a file that exists is a shard that is done; one
    of an earlier configuration counts until Snakemake makes it again. `tasks`: those of Slurm that
    have not all been reported.
    """
    counts, rows = _in_slurm(tasks, known), []
    for step in steps.configured(settings):
        results, total = _results(settings, step)
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
    return text_table([_STEP_COLUMNS, *rows], "llrrrrr") if rows else ""


def _in_slurm(tasks: Iterable[Task], known: Mapping[str, QueuedJob]) -> Counter[tuple[str, str]]:
    """Shards by (step, running, queued or failed). If Slurm does not answer, from the files."""
    counts: Counter[tuple[str, str]] = Counter()
    for task in tasks:
        job = known.get(task.job) or known.get(task.array)  # of a silent controller
        for number, shard in enumerate(task.shards):
            step = steps.of_rule(shard.rule)
            if number in task.ended:
                counts[step, "failed"] += task.ended[number]["exit"] != 0
            elif job is not None and job.active:
                counts[step, "running" if number == task.running and job.state != "PENDING" else "queued"] += 1
    return counts


def _results(settings: Settings, step: Step) -> tuple[list[Path], int]:
    """The files that stand for finished shards, and how many there will be."""
    folder = settings.run / step.folder
    files = {step.file.replace("{shard}", shard_name(number)) for number in range(settings.shards)}
    with suppress(OSError):
        return [folder / name for name in files.intersection(os.listdir(folder))], len(files)
    return [], len(files)


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


def _watch(runs: Sequence[Path], models: Sequence[Path]) -> int:
    """Redraw the tables until Ctrl-C; returns the exit code."""
    from rich.console import Console  # takes a tenth of a second
    from rich.live import Live
    from rich.text import Text

    try:
        with Live(console=Console(), auto_refresh=False) as live:
            while True:
                now = f"{datetime.now():%H:%M:%S}, every {INTERVAL:.0f} s; Ctrl-C ends this table, not the jobs"
                shown, _, remark = overview(runs, models)
                text = "\n\n".join(filter(None, [shown, remark, now]))
                live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
                time.sleep(INTERVAL)
    except KeyboardInterrupt:
        return 130


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.status", __doc__)
    folders = "run folders or model folders (default results/*)"
    parser.add_argument("folders", nargs="*", type=cli.input_path, metavar="FOLDER", help=folders)
    parser.add_argument("--watch", action="store_true", help="redraw the table every 5 seconds, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="for scripts: a list with one object per model folder")
    arguments = parser.parse_args(argv)
    if arguments.watch and arguments.json:
        raise InputError("--watch is for people and --json for scripts; give one of them")
    for folder in arguments.folders:
        require_folder(folder)
    given = arguments.folders or [path for path in sorted(Path("results").glob("*")) if _is_run(path)]
    if not given:
        raise InputError("results/*: no run yet; start one with snakemake, or name its folder")
    runs = [path for path in given if _is_run(path)]
    models = [path for path in given if path not in runs]
    if arguments.watch and sys.stdout.isatty():
        return _watch(runs, models)
    shown, statuses, remark = overview(runs, models)
    if remark:
        note(remark)
    print(orjson.dumps(statuses, option=orjson.OPT_INDENT_2).decode() if arguments.json else shown)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
