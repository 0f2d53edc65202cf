"""Trainings on a real Slurm that something interrupts: each is requeued, and ends as if nothing had
happened.
"""

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from common.files import read_json, read_rows
from tests.conftest import ROOT
from tests.slurm.lab import Lab, missing, slurm
from tests.training.helpers import copy_run, make_run

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")
SITE = {"executor": "slurm", "tasks_per_node": 1, "cpus_per_task": 1, "mem_gb_per_task": 1}


class Training:
    """A training of two processes on two nodes, configured in `folder`."""

    def __init__(self, lab: Lab, config: Path, **cluster: object) -> None:
        self.lab, self.folder, self.model = lab, config.parent, config.parent / "models" / "tiny"
        raw = yaml.safe_load(config.read_text())
        raw["models"]["tiny"]["time_limit_minutes"] = 60
        config.write_text(yaml.safe_dump({**raw, "cluster": {**SITE, **cluster}}))
        self.submit = [sys.executable, "-m", "cluster.submit", "--config", str(config), "--model", "tiny"]

    def run(self, *command: str) -> None:
        result = self.lab.run(*command, cwd=ROOT, timeout=500)
        assert result.returncode == 0, f"{result.stdout}{result.stderr}"

    @property
    def id(self) -> str:
        return str(read_json(self.model / "job.json")["id"])

    @property
    def record(self) -> Any:
        return read_json(self.model / "state.json")

    @property
    def state(self) -> str:
        return str(self.record["state"])

    def ranks(self) -> list[psutil.Process]:
        """Its processes, of which rank 0 is the first."""
        found = {}
        for process in psutil.process_iter():
            try:
                if "submitit.core._submit" in process.cmdline() and str(self.folder) in " ".join(process.cmdline()):
                    found[process.environ()["SLURM_PROCID"]] = process
            except (psutil.Error, KeyError):
                continue
        return [found[rank] for rank in sorted(found)]

    def until_saved(self) -> None:
        """Wait until a checkpoint exists and training has gone on since."""
        rows = self.model / "train.csv"
        self.lab.wait(lambda: rows.exists() and int((read_rows(rows) or [{"iteration": 0}])[-1]["iteration"]) >= 110)

    def last_checkpoint(self) -> dict[str, bytes]:
        newest = max(self.model.glob("iter_*"))
        return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


def test_a_killed_training_is_requeued_and_ends_with_the_digits_of_an_undisturbed_one(
    lab: Lab, tmp_path: Path, tiny_run: Path
) -> None:
    training = Training(lab, copy_run(tiny_run, tmp_path))
    undisturbed = training.last_checkpoint()
    shutil.rmtree(training.model / "iter_0000020")
    (training.model / "done.json").unlink()
    training.run(*training.submit)
    lab.wait(lambda: len(training.ranks()) == 2)
    training.ranks()[1].kill()
    training.run(*training.submit, "--wait")
    shown = lab.job(training.id)
    assert (shown["JobState"], shown["Restarts"], shown["NodeList"]) == ("COMPLETED", "1", "node[1-2]")
    assert training.state == "finished" and training.last_checkpoint() == undisturbed
    assert "iter_0000010" in (training.model / "logs" / f"{training.id}_0_log.out").read_text()


OWN = """
import sys, submitit
from cluster import TrainingJob

executor = submitit.AutoExecutor(folder=f"{sys.argv[1]}/logs")
executor.update_parameters(nodes=2, tasks_per_node=1, cpus_per_task=1, mem_gb=1, timeout_min=60)
print(executor.submit(TrainingJob(f"{sys.argv[1]}/config.yaml", "tiny")).job_id)
"""


@pytest.mark.slow
def test_an_executor_of_ones_own_goes_on_after_a_preemption(lab: Lab, tmp_path: Path, tiny_run: Path) -> None:
    training = Training(lab, copy_run(tiny_run, tmp_path))
    undisturbed = training.last_checkpoint()
    shutil.rmtree(training.model / "iter_0000020")
    (training.model / "done.json").unlink()
    number = lab.check(sys.executable, "-c", OWN, str(tmp_path)).split()[-1]
    claimed = training.model / "owner.json"
    lab.wait(claimed.exists)
    lab.check("scancel", "--signal=USR2", number)
    lab.wait(lambda: (training.model / "done.json").exists())
    assert (lab.job(number)["Restarts"], training.last_checkpoint()) == ("1", undisturbed)


def long_run(folder: Path) -> Path:
    return make_run(folder, parallel={"tensor": 2}, train={"iterations": 400, "save_interval": 100})


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The final parameters of a long training that nothing disturbs."""
    training = Training(lab, long_run(tmp_path_factory.mktemp("undisturbed")))
    training.run(*training.submit, "--wait")
    return training.last_checkpoint()


def lose_the_controller(training: Training) -> None:
    training.lab.wait_saved(training.id)
    training.lab.stop_controller()
    time.sleep(20)
    training.lab.start_controller()


PREEMPTS = ["--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "srun sleep 3"]
INTERRUPTIONS: dict[str, Callable[[Training], object]] = {
    "USR2": lambda training: training.lab.check("scancel", "--signal=USR2", training.id),
    "requeue": lambda training: training.lab.check("scontrol", "requeue", training.id),
    "a dead node": lambda training: training.lab.kill_node("node2"),
    "no controller": lose_the_controller,
    "preemption": lambda training: training.lab.check("sbatch", *PREEMPTS),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", INTERRUPTIONS)
def test_an_interrupted_training_goes_on(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, undisturbed: dict[str, bytes], what: str
) -> None:
    with slurm(tmp_path_factory.mktemp("lab"), nodes=2 + (what == "a dead node")) as lab:
        training = Training(lab, long_run(tmp_path), partition="low")
        training.run(*training.submit)
        training.until_saved()
        assert training.state == "running"
        INTERRUPTIONS[what](training)
        if what != "no controller":
            lab.wait(lambda: training.record["restarts"] == 1 and training.state == "running")
        training.run(*training.submit, "--wait")
        assert int(lab.job(training.id)["Restarts"]) >= (what != "no controller")
        assert training.state == "finished" and training.last_checkpoint() == undisturbed
