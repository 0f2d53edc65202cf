"""What is known of each training: its job's state, iteration, losses, speed, time left; from Slurm and from files."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from typing import Any

from cluster.jobs import SILENT, Job, current_state, log_path, look
from cluster.slurm import QueuedJob
from common.console import note
from common.errors import ConfigError, InputError
from common.files import read_json, read_rows
from common.yaml_text import read_yaml
from training.model_folder import newest_iteration
from training.monitoring.heartbeat import progress_of

COLUMNS = (
    "model folder", "state", "job", "nodes", "iteration", "loss", "valid loss", "tokens/s", "ETA", "restarts"
)  # fmt: skip
ALIGN = "llllrrrrrr"
_LONGEST_REASON = 60  # characters in the table; --json has all of it


def look_at(jobs: Sequence[Job]) -> dict[str, Mapping[str, QueuedJob] | None]:
    """What `look` knows by executor: one squeue call. Without an answer of Slurm, it is None, and a note is printed."""
    known = {"local": look([job for job in jobs if job.executor == "local"])}
    why = SILENT
    try:
        known["slurm"] = look([job for job in jobs if job.executor == "slurm"])
    except InputError as error:  # not a login node
        known["slurm"], why = None, str(error)
    if known["slurm"] is None:
        note(f"{why}; states are those of the files")
    return known


def model_status(folder: Path, job: Job | None, known: Mapping[str, QueuedJob] | None) -> dict[str, Any]:
    """What is known of a model folder: losses in nats, times in seconds, None for what is unknown."""
    done = folder / "done.json"
    train, valid = ((read_rows(folder / f"{name}.csv") or [{}])[-1] for name in ("train", "valid"))
    iteration, total = _number(train.get("iteration")), total_iterations(folder, job)
    iteration = max(iteration or 0, newest_iteration(folder)) or None  # a run that was stopped between two rows
    status: dict[str, Any] = {"folder": str(folder), "state": "finished" if done.exists() else "no job", "reason": ""}
    status |= {"job": None, "executor": None, "nodes": None, "restarts": None, "log": None}
    if job is not None:
        state, seen = current_state(folder, job, known), known.get(job.id) if known is not None else None
        reason = "" if state.reason in ("None", SILENT) else state.reason
        status |= {"state": state.state, "reason": reason, "job": job.id, "executor": job.executor}
        status |= {"nodes": (seen.nodes if seen else "") or None, "restarts": state.restarts, "log": str(log_path(job))}
    if status["state"] == "finished":
        with suppress(InputError, KeyError):
            iteration = read_json(done)["iteration"]
    speed, left, loss = _number(train.get("ms_per_iteration")), None, _number(train.get("lm_loss"))
    if status["state"] == "running" and iteration is not None and total is not None and speed is not None:
        left = max(0.0, total - iteration) * speed / 1000
    newer = progress_of(folder)
    if newer and newer["done"] > (iteration or 0):
        iteration, loss = newer["done"], _number(newer["loss"])
        left = newer["seconds_left"] if status["state"] == "running" else None
    return status | {
        "iteration": None if iteration is None else int(iteration),
        "iterations": total,
        "loss": loss,
        "valid_loss": _number(valid.get("loss")),
        "tokens_per_second": _number(train.get("tokens_per_second")),
        "mfu": _number(train.get("mfu")),
        "seconds_left": left,
    }


def total_iterations(folder: Path, job: Job | None) -> int | None:
    """train.iterations of the job's snapshot, or of the last training in the folder; None if no file tells."""
    snapshots = [Path(job.snapshot)] if job is not None and job.snapshot else []
    for path in (parent / "settings.yaml" for parent in (*snapshots, folder)):
        with suppress(ConfigError, KeyError, TypeError, ValueError):
            return int(read_yaml(path)["models"][folder.name]["train"]["iterations"])
    return None


def _number(cell: str | float | None) -> float | None:
    """The number in a CSV cell; None if the cell is empty, missing, or not a finite number."""
    try:
        number = float(cell or "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def row(status: Mapping[str, Any]) -> list[str]:
    """The COLUMNS of one model folder, as text."""
    iteration, total, left = status["iteration"], status["iterations"], status["seconds_left"]
    reason = shorten(status["reason"], _LONGEST_REASON, placeholder=" …")
    return [
        status["folder"],
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
