"""Layouts measured as jobs: of a fake Slurm, and on this machine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cluster.autotune import main
from common.config import load_settings
from tests.cluster.fake_slurm import FakeJob, FakeSlurm
from tests.cluster.helpers import Call
from tests.conftest import ROOT
from tests.helpers import assert_one_line_error
from tests.training.helpers import wait_for, write_config
from training.planning.layout import Layout

Seen = Callable[[FakeJob, Path], object]


def written(tmp_path: Path, **cluster: object) -> Path:
    """A configuration of a tiny model on two CPU processes."""
    model = {"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_len": 8}
    return write_config(tmp_path, model, {"data": 2}, {}, cluster={"tasks_per_node": 2, **cluster})


class Site:
    """The fake Slurm; at each of the command's looks, `happens` to each job that has not ended."""

    def __init__(self, fake: FakeSlurm, folder: Path, call: Call) -> None:
        self.fake, self.folder, self._call = fake, folder, call
        self.config = written(folder, executor="slurm")
        self.happens: Seen = self.finish
        self.most = 0
        """Jobs that were alive together."""
        self.clock = 0.0

    def sleep(self, _seconds: float) -> None:
        """What passes between two looks: an hour."""
        alive = [job for job in self.fake.jobs() if job.state in ("PENDING", "RUNNING")]
        self.most = max(self.most, len(alive))
        self.clock += 3600
        for job in alive:
            self.happens(job, Path(job.script.rpartition("--output ")[2].split()[0]))  # the probe's; srun has one, too

    def finish(self, job: FakeJob, output: Path) -> None:
        """A job measures as many tokens per second as its number says."""
        output.write_text(json.dumps({"measured": {"memory": 3e8, "tokens_per_second": float(job.id)}}))
        self.fake.change(job.id, state="COMPLETED")

    def tune(self, *arguments: object) -> "subprocess.CompletedProcess[str]":
        return self._call(main, "--config", self.config, "--model", "tiny", *arguments)

    def results(self) -> dict[str, Any]:
        """The results so far, by the names of the layouts."""
        paths = (self.folder / "autotune/tiny").glob("layout_*.json")
        return {path.stem: json.loads(path.read_text()) for path in paths}


@pytest.fixture
def site(tmp_path: Path, fake: FakeSlurm, call: Call, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A Slurm whose jobs finish at once."""
    made = Site(fake, tmp_path, call)
    monkeypatch.setattr("cluster.trials.time", SimpleNamespace(sleep=made.sleep, monotonic=lambda: made.clock))
    return made


def test_the_fastest_of_the_best_predicted_layouts_is_written(tmp_path: Path, site: Site) -> None:
    done = site.tune("--top", 3, "--steps", 2, "--minutes", 7, "--write", tmp_path / "best.yaml")
    assert done.returncode == 0, done.stderr
    jobs = site.fake.jobs()
    assert len(jobs) == 3 == len(site.results()) and site.most == 1
    assert all("-m training.probe " in job.script and "--steps 2 --output " in job.script for job in jobs)
    assert all((job.asked["time"], job.asked["ntasks-per-node"]) == ("7", "2") for job in jobs)
    *_, third, last = done.stdout.splitlines()
    assert third.split()[0] == "3" and "1,002" in third and "1,002" in last
    keys = yaml.safe_load((tmp_path / "best.yaml").read_text())["models"]["tiny"]
    raw = yaml.safe_load(site.config.read_text())
    raw["models"]["tiny"]["parallel"] = keys["parallel"]
    raw["models"]["tiny"]["train"] |= keys["train"]
    (tmp_path / "merged.yaml").write_text(yaml.safe_dump(raw))
    chosen = load_settings(tmp_path / "merged.yaml").models["tiny"]
    measured = load_settings(next((tmp_path / "autotune/tiny/snapshots").glob("*/settings.yaml"))).models
    best = next(name for name, result in site.results().items() if result["measured"]["tokens_per_second"] == 1002)
    assert chosen.world_size == 2 and Layout.of(chosen) == Layout.of(measured[best])


def test_finished_layouts_are_not_run_again_unless_their_question_changed(site: Site) -> None:
    assert site.tune("--top", 2).returncode == 0
    assert site.tune("--top", 4, "--side-by-side", 2).returncode == 0
    assert len(site.fake.jobs()) == 4 and site.most == 2
    assert site.tune("--top", 3, "model.dropout=0").returncode == 0 and len(site.fake.jobs()) == 7


@pytest.mark.parametrize("recorded", [True, False])
def test_after_ctrl_c_the_same_command_finds_the_job_that_runs(site: Site, recorded: bool) -> None:
    def interrupt(job: FakeJob, output: Path) -> None:
        site.fake.change(job.id, state="RUNNING")
        if not recorded:  # as if killed just after sbatch
            next((site.folder / "autotune/tiny/models").glob("*/job.json")).unlink()
        raise KeyboardInterrupt

    site.happens = interrupt
    assert site.tune("--top", 2).returncode == 130
    (job,) = site.fake.jobs()
    assert job.state == "RUNNING", "a Slurm job goes on"
    site.happens = site.finish
    assert site.tune("--top", 2).returncode == 0 and len(site.fake.jobs()) == 2


def test_layouts_that_fail_are_rows_and_are_run_again_on_request(site: Site) -> None:
    def fail(job: FakeJob, output: Path) -> None:
        log = site.folder / f"autotune/tiny/models/{output.stem}/logs/{job.id}_0_log.out"
        log.write_text("loading\nKilled\n")
        if job.id == "1003":
            return site.finish(job, output)
        if job.id == "1000":
            output.write_text('{"failed": "out of memory"}')
        site.fake.change(job.id, state={"1000": "FAILED", "1001": "TIMEOUT", "1002": "NODE_FAIL"}[job.id])

    site.happens = fail
    done = site.tune("--top", 4)
    rows = [line for line in done.stdout.splitlines() if "failed: " in line]
    assert done.returncode == 0 and len(rows) == 3 and all("_0_log.out" in row for row in rows)
    for row, reason in zip(rows, ("out of memory", "10 minutes", "Killed"), strict=True):
        assert reason in row
    site.happens = site.finish
    assert site.tune("--top", 4).returncode == 0 and len(site.fake.jobs()) == 4
    assert site.tune("--top", 4, "--retry").returncode == 0 and len(site.fake.jobs()) == 7


def test_a_job_waits_in_the_queue_as_long_as_it_takes_but_not_if_it_hangs_or_never_starts(site: Site) -> None:
    looks: list[str] = []

    def wait(job: FakeJob, output: Path) -> None:
        looks.append(job.id)
        if job.id == "1000":
            site.fake.change(job.id, reason="PartitionTimeLimit")
        elif job.id == "1001":
            site.fake.change(job.id, state="RUNNING")
        elif looks.count(job.id) == 5:  # hours
            site.finish(job, output)

    site.happens = wait
    done = site.tune("--top", 3)
    assert done.returncode == 0 and "PartitionTimeLimit" in done.stdout and "10 minutes" in done.stdout, done.stderr
    assert [job.state for job in site.fake.jobs()] == ["CANCELLED", "CANCELLED", "COMPLETED"]
    site.happens = site.finish
    assert site.tune("--top", 3).returncode == 0 and len(site.fake.jobs()) == 4, "nothing was learnt about the first"


def test_if_nothing_could_be_measured_the_reason_is_quoted(site: Site) -> None:
    def fail(job: FakeJob, output: Path) -> None:
        log = site.folder / f"autotune/tiny/models/{output.stem}/logs/{job.id}_0_log.out"
        log.write_text("loading\nImportError: no torch\n")
        site.fake.change(job.id, state="FAILED")

    site.happens = fail
    done = site.tune("--top", 2)
    first, *quoted = done.stderr.splitlines()
    assert done.returncode == 2 and "_0_log.out" in first and quoted == ["    loading", "    ImportError: no torch"]
    site.fake.behave(refuses="Invalid partition name specified")
    assert_one_line_error(site.tune("--top", 1, "model.dropout=0"), "cluster.partition")


@pytest.mark.parametrize(
    ("cluster", "arguments", "key"),
    [
        ({}, ["--side-by-side", 2], "--side-by-side"),
        ({"gpus_per_node": 8}, [], "cluster.gpu"),
        ({}, ["--gpu", "h100"], "cluster.gpus_per_node"),
        ({"gpus_per_node": 8}, ["--gpu", "h1000"], "'h100'"),
        ({"gpus_per_node": 3, "gpu": "h100", "executor": "slurm"}, ["--gpus", 4], "nodes of 3"),
        ({}, ["--gpus", 7, "train.global_batch_size=8"], "7 GPUs"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    tmp_path: Path, call: Call, cluster: dict[str, Any], arguments: list[object], key: str
) -> None:
    config = written(tmp_path, **cluster)
    assert_one_line_error(call(main, "--config", config, "--model", "tiny", *arguments), key)


@pytest.mark.slow
def test_on_this_machine_ctrl_c_ends_the_job_and_the_same_command_goes_on(tmp_path: Path) -> None:
    config, models = written(tmp_path), tmp_path / "autotune/tiny/models"
    command = [sys.executable, "-m", "cluster.autotune", "--config", str(config), "--model", "tiny", "--top", "1"]
    for interrupted in (True, False):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
        if interrupted:
            wait_for(lambda: list(models.glob("*/logs/*_0_log.out")))
            os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=120)
        assert process.returncode == (130 if interrupted else 0)
        job = json.loads(next(models.glob("*/job.json")).read_text())
        assert not interrupted or not Path(f"/proc/{job['id']}").exists(), "the job ended with it"
    (result,) = (json.loads(path.read_text()) for path in models.parent.glob("layout_*.json"))
    assert result["measured"]["tokens_per_second"] > 0
