"""Layouts measured as jobs: of a fake Slurm, and on this machine."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import submitit
import yaml

from cluster.autotune import main
from cluster.training_job import TrialJob
from common.config import load_settings
from tests.cluster.fake_slurm import FakeJob, FakeSlurm
from tests.conftest import Command
from tests.helpers import called
from tests.training.helpers import write_config
from training.planning.layout import Layout


def submitted(job: FakeJob) -> TrialJob:
    """What the ranks of a job run."""
    pickle = Path(job.asked["output"]).with_name(f"{job.id}_submitted.pkl")
    trial: TrialJob = submitit.helpers.DelayedSubmission.load(pickle).function
    return trial


def figures(tokens_per_second: float | None) -> dict[str, float | None]:
    sizes = dict.fromkeys(("parameters", "optimizer", "transient", "context", "memory"), 3e8)
    return {**sizes, "step_seconds": 0.5, "tokens_per_second": tokens_per_second, "mfu": 0.25}


class Site:
    """The fake Slurm; at each of the command's poll, `happens` to each job that has not ended."""

    def __init__(self, fake: FakeSlurm, folder: Path) -> None:
        self.fake, self.folder = fake, folder
        model = {"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_len": 8}
        cluster = {"tasks_per_node": 2, "executor": "slurm", "mem_gb_per_task": 8}
        self.config = write_config(folder, model, {"data": 2}, {}, cluster=cluster)
        self.happens: Callable[[FakeJob, Path], object] = self.finish
        self.clock = 0.0

    def sleep(self, _seconds: float) -> None:
        """What passes between two looks: an hour."""
        alive = [job for job in self.fake.jobs() if job.state in ("PENDING", "RUNNING")]
        self.clock += 3600
        for job in alive:
            self.happens(job, Path(submitted(job).output))

    def finish(self, job: FakeJob, output: Path) -> None:
        """A job measures as many tokens per second as its number says."""
        output.write_text(json.dumps({"measured": figures(float(job.id)), "predicted": figures(None)}))
        self.fake.change(job.id, state="COMPLETED")

    def tune(self, *arguments: object) -> "subprocess.CompletedProcess[str]":
        return called(main, "--config", self.config, "--model", "tiny", *arguments)

    def results(self) -> dict[str, Any]:
        """The results so far, by the names of the layouts."""
        paths = (self.folder / "autotune/tiny").glob("layout_*.json")
        return {path.stem: json.loads(path.read_text()) for path in paths}


@pytest.fixture
def site(tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A Slurm whose jobs finish at once."""
    made = Site(fake, tmp_path)
    times = SimpleNamespace(sleep=made.sleep, monotonic=lambda: made.clock, time=lambda: made.clock)
    monkeypatch.setattr("cluster.jobs.time", times)
    return made


def test_the_fastest_of_the_best_predicted_layouts_is_written(tmp_path: Path, site: Site) -> None:
    done = site.tune("--top", 3, "--steps", 2, "--minutes", 7, "--write", tmp_path / "best.yaml")
    assert done.returncode == 0, done.stderr
    jobs = site.fake.jobs()
    assert len(jobs) == 3 == len(site.results())
    assert all(submitted(job).steps == 2 and not submitted(job).requeue for job in jobs)
    assert all((job.asked["time"], job.asked["ntasks-per-node"]) == ("7", "2") for job in jobs)
    assert "\n 3  1,002 tokens/s" in done.stdout and "\nfastest: " in done.stdout
    rows = [re.split(" {2,}", line) for line in done.stdout.splitlines()]
    assert ["tokens/s", "not predicted", "1,002", "-"] in rows and ["MFU", "25.0%", "25.0%", "+0.0 %"] in rows
    keys = yaml.safe_load((tmp_path / "best.yaml").read_text())["models"]["tiny"]
    raw = yaml.safe_load(site.config.read_text())
    raw["models"]["tiny"]["parallel"] = keys["parallel"]
    raw["models"]["tiny"]["train"] |= keys["train"]
    (tmp_path / "merged.yaml").write_text(yaml.safe_dump(raw))
    chosen = load_settings(tmp_path / "merged.yaml").models["tiny"]
    measured = load_settings(next((tmp_path / "autotune/tiny/snapshots").glob("*/settings.yaml"))).models
    best = next(name for name, result in site.results().items() if result["measured"]["tokens_per_second"] == 1002)
    assert chosen.world_size == 2 and Layout.of(chosen) == Layout.of(measured[best])


def test_a_layout_that_fails_or_never_starts_is_reported_and_tried_again_next_time(site: Site) -> None:
    looks: list[str] = []

    def wait(job: FakeJob, output: Path) -> None:
        looks.append(job.id)
        if job.id == "1000":
            site.fake.change(job.id, reason="PartitionTimeLimit")
        elif job.id == "1001":
            site.fake.change(job.id, state="TIMEOUT")
        elif looks.count(job.id) == 5:  # hours in the queue
            site.finish(job, output)

    site.happens = wait
    done = site.tune("--top", 3)
    assert done.returncode == 0 and "PartitionTimeLimit" in done.stdout and "TIMEOUT" in done.stdout, done.stderr
    assert [job.state for job in site.fake.jobs()] == ["CANCELLED", "TIMEOUT", "COMPLETED"]
    site.happens = site.finish
    assert site.tune("--top", 3).returncode == 0 and len(site.fake.jobs()) == 5, "the two that failed"
    assert site.tune("--top", 3, "model.dropout=0").returncode == 0 and len(site.fake.jobs()) == 8, "another question"


@pytest.mark.slow
def test_a_given_layout_is_measured_on_this_machine(tmp_path: Path, command: Command) -> None:
    config = write_config(tmp_path, {"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_len": 8}, {"data": 2}, {})
    options = ("--config", config, "--model", "tiny", "--steps", 2, "--given")
    done = command("cluster.autotune", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the given layout on 2 x cpu" in done.stdout and "memory of the fullest process" in done.stdout
    (path,) = (tmp_path / "autotune/tiny").glob("layout_*.json")
    result = json.loads(path.read_text())
    assert result["layout"]["data"] == 2 and result["measured"]["step_seconds"] > 0
    done = command("cluster.autotune", *options, "parallel=auto")
    assert done.returncode == 2 and "leave --given out" in done.stderr
