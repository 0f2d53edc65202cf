"""Configurations, model folders and jobs for tests of cluster/, none of which trains."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from cluster.jobs import Job, State, read_state, write_job, write_state
from common.config import validate
from common.settings import Settings
from tests.cluster.fake_slurm import FakeSlurm


def settings(folder: Path, parallel: dict[str, int] | None = None, **cluster: object) -> Settings:
    """One model, `tiny`, of 16 processes unless `parallel` says otherwise."""
    model = {
        "model": {"n_layer": 2, "n_head": 4, "n_embd": 8, "seq_len": 8},
        "parallel": {"tensor": 2, "data": 8} if parallel is None else parallel,
        "train": {"iterations": 20, "micro_batch_size": 1},
    }
    raw = {"run": str(folder), "urls": ["x"], "models": {"tiny": model}, "cluster": cluster}
    return validate(raw, "test")


def write_settings(folder: Path, **cluster: object) -> Path:
    """A configuration file of two processes."""
    text = yaml.safe_dump(settings(folder, {"data": 2}, **cluster).model_dump(mode="json"))
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def model_folder(folder: Path) -> Path:
    """The folder of the model in `settings`."""
    made = folder / "models" / "tiny"
    made.mkdir(parents=True, exist_ok=True)
    return made


def slurm_job(
    folder: Path, fake: FakeSlurm, state: str = "RUNNING", recorded: State | None = None, **values: Any
) -> Job:
    """A job in the queue, recorded in a model folder."""
    queued = fake.add("run-tiny-0123", state=state, **values)
    job = Job(queued.id, "slurm", str(folder / "logs"), queued.name)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    write_job(folder, job)
    write_state(folder, recorded or State(job.id, "queued"))
    return job


def finish(folder: Path, fake: FakeSlurm, job: Job) -> None:
    """A training finishes, and its job with it."""
    (folder / "done.json").write_text("{}")
    write_state(folder, State(job.id, "finished"))
    fake.change(job.id, state="COMPLETED")


def claim(folder: Path, owner: str) -> None:
    """What a training leaves in its model folder while it runs."""
    (folder / "owner.json").write_text(f'{{"job": "{owner}", "token": "x"}}')


def add_checkpoint(folder: Path, iteration: int) -> None:
    """A folder that counts as a checkpoint."""
    (folder / f"iter_{iteration:07d}").mkdir(parents=True)
    (folder / f"iter_{iteration:07d}" / "manifest.json").write_text("{}")


def at_each_squeue(fake: FakeSlurm, *steps: Callable[[], object], **behaviour: Any) -> None:
    """Do the next of these at each call of squeue, before it answers."""
    left = iter(steps)
    fake.behave(meanwhile=lambda command: command == "squeue" and next(left, bool)(), **behaviour)


def state_of(folder: Path, job: Job) -> State:
    """The recorded state of a job."""
    state = read_state(folder, job)
    assert state is not None
    return state
