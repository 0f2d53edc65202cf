"""Trainings that take the nodes there are: fewer after a loss, all when they are back."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from common.files import read_rows
from tests.conftest import ROOT
from tests.slurm.lab import Lab, missing, slurm
from tests.slurm.test_training import Training
from tests.training.helpers import make_run

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here"), pytest.mark.slow]
BATCH = {"global_batch_size": 12, "micro_batch_size": 1, "iterations": 300, "save_interval": 20, "lr": 0.001}
"""12 samples divide over 4, 3 and 2 nodes; 16 over 4 and 2 only."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with slurm(tmp_path_factory.mktemp("lab"), nodes=4) as lab:
        yield lab


class Elastic(Training):
    """A training of four processes on as many nodes, two at least."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        parallel: dict[str, int] | None = None,
        site: dict[str, int] | None = None,
        **train: Any,
    ) -> None:
        model, layout = {"dropout": 0.0}, parallel or {"data": 4}
        config = make_run(folder, model=model, parallel=layout, train={**BATCH, **train})
        super().__init__(lab, config, **{"min_nodes": 2, "partition": "low", **(site or {})})

    def until(self, nodes: int) -> None:
        """Wait until it trains on so many nodes, and has made a step there."""

        def trains() -> bool:
            starts, rows = read_rows(self.model / "starts.csv"), read_rows(self.model / "train.csv")
            started = bool(starts) and int(starts[-1]["nodes"]) == nodes and self.state == "running"
            done = int(rows[-1]["iteration"]) if rows else 0
            return started and done > int(starts[-1]["iteration"]) and any(self.model.glob("iter_*/manifest.json"))

        self.lab.wait(trains)

    def finish(self) -> list[int]:
        """Wait for the end; returns the nodes of each start."""
        self.run(*self.submit, "--wait")
        assert self.state == "finished"
        return [int(row["nodes"]) for row in read_rows(self.model / "starts.csv")]

    def differences(self, other: Training) -> tuple[float, float]:
        """The largest differences: of a loss, and of a tensor relative to its largest value."""
        losses = [[float(row["lm_loss"]) for row in read_rows(run.model / "train.csv")] for run in (self, other)]
        assert len(losses[0]) == BATCH["iterations"]
        loss = max(abs(a - b) for a, b in zip(*losses, strict=True))
        mine, theirs = (merged(run) for run in (self, other))
        errors = [
            abs(mine[name] - theirs[name]).max() / abs(theirs[name]).max() for name in mine if "c_attn.bias" not in name
        ]
        return loss, max(map(float, errors))


def merged(training: Training) -> dict[str, Any]:
    """The weights of its last checkpoint, by Hugging Face's names."""
    output = training.folder / "merged"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "convert.merge_mp", "--checkpoint", str(training.model), "--output", str(output)]
    result = training.lab.run(*command, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return dict(load_file(output / "model.safetensors"))


def drain(lab: Lab, node: str, state: str = "drain") -> None:
    lab.check("scontrol", "update", f"nodename={node}", f"state={state}", *["reason=test"] * (state == "drain"))


def restart(training: Training) -> None:
    training.lab.check("scancel", "--signal=USR2", training.id)


@pytest.fixture(scope="module")
def quiet(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Elastic:
    """A training that stays on its four nodes."""
    training = Elastic(lab, tmp_path_factory.mktemp("quiet"))
    training.run(*training.submit)
    assert training.finish() == [4]
    return training


def test_a_training_loses_nodes_and_grows_when_they_are_back(
    lab: Lab, tmp_path: Path, quiet: Elastic, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Elastic(lab, tmp_path)
    training.run(*training.submit)
    training.until(4)
    lab.kill_node("node4")
    training.until(3)
    shown = lab.check(sys.executable, "-m", "cluster.status", str(training.model))
    assert "3 of 4 nodes, 25 % slower than planned" in shown
    drain(lab, "node3")
    restart(training)
    training.until(2)
    lab.start_node("node4")
    drain(lab, "node3", "resume")
    lab.wait(lambda: "it saves and starts again on 4" in grown(training))
    training.until(4)
    assert training.finish() == [4, 3, 2, 4]
    loss, weights = training.differences(quiet)
    with capsys.disabled():
        print(f"\n4, 3, 2, 4 nodes: losses within {loss:.1e}, weights {weights:.1e}")
    assert loss < 1e-5 and weights < 1e-4


def grown(training: Training) -> str:
    """What --grow says; it does nothing while too few nodes are idle."""
    return training.lab.check(*training.submit, "--grow")


@pytest.mark.parametrize(
    ("parallel", "train", "left"),
    [
        pytest.param({"data": 4, "zero_stage": 3}, {"optimizer": "muon"}, 3, id="Muon and ZeRO 3"),
        pytest.param({"data": 2, "pipeline": 2}, {}, 2, id="pipeline"),
        pytest.param(
            {"tensor": 2, "data": 4},
            {"global_batch_size": 16, "site": {"tasks_per_node": 2}},
            2,
            id="a batch for 4 and 2 nodes",
        ),
    ],
)
def test_a_layout_takes_what_it_can_use_of_three_nodes(
    lab: Lab, tmp_path: Path, parallel: dict[str, int], train: dict[str, Any], left: int
) -> None:
    training = Elastic(lab, tmp_path, parallel, iterations=200, **train)
    training.run(*training.submit)
    training.until(4)
    drain(lab, "node4")
    restart(training)
    training.until(left)
    assert lab.job(training.id)["NumNodes"] == str(left), "a node that it cannot use was given back"
    drain(lab, "node4", "resume")
    assert training.finish() == [4, left]


def test_below_the_minimum_a_job_waits_and_a_job_of_higher_priority_shrinks_it(lab: Lab, tmp_path: Path) -> None:
    training = Elastic(lab, tmp_path, iterations=200)
    training.run(*training.submit)
    training.until(4)
    urgent = lab.check(
        "sbatch", "--parsable", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 600"
    ).strip()
    lab.wait(lambda: training.state == "requeued" and lab.job(training.id)["JobState"] == "PENDING")
    lab.wait(lambda: lab.job(training.id)["Reason"] in ("Resources", "Priority", "BeginTime"))
    lab.check("scancel", urgent)
    urgent = lab.check(
        "sbatch", "--parsable", "--nodes=1", "--exclusive", "--output=/dev/null", "--wrap", "sleep 600"
    ).strip()
    training.until(3)
    lab.check("scancel", urgent)
    assert training.finish()[-1] == 3


OWN = """
import sys, submitit
from cluster import TrainingJob

executor = submitit.SlurmExecutor(folder=f"{sys.argv[1]}/logs")
executor.update_parameters(
    nodes=4, cpus_per_task=1, mem="1G", time=60, additional_parameters={"nodes": "2-4", "partition": "low"}
)
print(executor.submit(TrainingJob(f"{sys.argv[1]}/config.yaml", "tiny")).job_id)
"""


def test_an_executor_of_ones_own_may_ask_for_a_range(lab: Lab, tmp_path: Path) -> None:
    training = Elastic(lab, tmp_path, iterations=60)
    drain(lab, "node4")
    lab.check(sys.executable, "-c", OWN, str(tmp_path))
    lab.wait(lambda: (training.model / "done.json").exists())
    drain(lab, "node4", "resume")
    assert [row["nodes"] for row in read_rows(training.model / "starts.csv")] == ["3"]


def test_a_node_that_dies_in_a_save_costs_only_that_save(lab: Lab, tmp_path: Path, quiet: Elastic) -> None:
    training = Elastic(lab, tmp_path)
    training.run(*training.submit)
    training.until(4)
    saving = training.model.glob("*.tmp*")
    lab.wait(lambda: any(saving) or any(training.model.glob("*.tmp*")))
    lab.kill_node("node4")
    training.until(3)
    lab.start_node("node4")
    assert training.finish() == [4, 3]
    loss, weights = training.differences(quiet)
    assert loss < 1e-5 and weights < 1e-4


def test_a_job_waits_for_all_nodes_then_takes_what_is_idle_also_after_a_requeue(lab: Lab, tmp_path: Path) -> None:
    training = Elastic(lab, tmp_path, site={"shrink_after_minutes": 1, "cpus_per_task": 8}, iterations=100)
    drain(lab, "node4")
    waiting = lab.start(*training.submit, "--wait", cwd=ROOT)
    lab.wait(lambda: (training.model / "job.json").exists() and lab.job(training.id)["NumNodes"].startswith("4"))
    training.until(3)
    restart(training)
    lab.wait(
        lambda: lab.job(training.id)["NumTasks"] == "4"
    )  # one per node, although NumNodes is that of its last start
    drain(lab, "node4", "resume")
    lab.wait(lambda: training.state == "finished")
    shown, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0 and "accepts 3 of 4 nodes now" in shown
    assert [int(row["nodes"]) for row in read_rows(training.model / "starts.csv")] == [3, 4]
