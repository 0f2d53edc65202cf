"""Trainings that take the nodes there are: fewer after a loss, all when they are back."""

from pathlib import Path

import pytest

from common.files import read_rows
from tests.slurm.lab import missing, slurm
from tests.slurm.test_training import Training
from tests.training.helpers import make_run

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here"), pytest.mark.slow]
RUN = {"parallel": {"data": 4}, "train": {"iterations": 600, "global_batch_size": 12, "micro_batch_size": 1}}


def losses(training: Training) -> list[float]:
    return [float(row["lm_loss"]) for row in read_rows(training.model / "train.csv")]


def processes(training: Training) -> int:
    """The running ranks; 0 while it starts or ends."""
    return len(training.ranks()) if training.state == "running" else 0


def test_a_training_shrinks_with_its_nodes_and_grows_when_they_are_back(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runs = {name: make_run(tmp_path / name, **RUN) for name in ("disturbed", "quiet")}
    with slurm(tmp_path_factory.mktemp("lab"), nodes=4) as lab:
        quiet = Training(lab, runs["quiet"])
        quiet.run(*quiet.submit, "--wait")
        training = Training(lab, runs["disturbed"], min_nodes=2)
        training.run(*training.submit)
        lab.wait(lambda: processes(training) == 4)
        training.until_saved()
        lab.kill_node("node4")
        lab.wait(lambda: processes(training) == 3)
        lab.check("scontrol", "update", "nodename=node3", "state=drain", "reason=test")
        lab.check("scancel", "--signal=USR2", training.id)
        lab.wait(lambda: processes(training) == 2)
        lab.start_node("node4")
        lab.check("scontrol", "update", "nodename=node3", "state=resume")
        lab.check("scancel", "--signal=USR2", training.id)
        lab.wait(lambda: processes(training) == 4)
        training.run(*training.submit, "--wait")
        assert training.state == "finished"
    assert losses(training) == pytest.approx(losses(quiet), abs=1e-5)
