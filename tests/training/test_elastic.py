"""cluster.min_nodes: a training resumes on fewer processes, and on all, with the same losses."""

from pathlib import Path
from typing import Any

import pytest

from common.files import read_rows
from common.settings import Settings
from tests.training.helpers import launch_ok, make_run, settings_of
from training.planning.elastic import on_processes, process_counts
from training.planning.machines import cpu_machine
from training.planning.search import predict

CLUSTER = {"executor": "slurm", "tasks_per_node": 1, "min_nodes": 2}
RUN: dict[str, Any] = {
    "model": {"dropout": 0.0},
    "parallel": {"data": 4, "zero_stage": 1},
    "train": {"global_batch_size": 12, "micro_batch_size": 1, "lr_decay": "constant", "warmup": 0, "lr": 0.001},
    "cluster": CLUSTER,
}


def test_a_training_resumes_on_three_of_four_nodes_and_on_four_with_the_same_losses(tmp_path: Path) -> None:
    changing, steady = (make_run(tmp_path / name, **RUN) for name in ("changing", "steady"))
    for processes, iterations in ((4, 2), (3, 4), (4, 6)):
        given = ("--config", changing, "--model", "tiny", f"train.iterations={iterations}")
        launch_ok(processes, "training.train", *given)
    launch_ok(4, "training.train", "--config", steady, "--model", "tiny", "train.iterations=6")
    rows = [read_rows(config.parent / "models/tiny/train.csv") for config in (changing, steady)]
    mine, theirs = ([float(row["lm_loss"]) for row in each] for each in rows)
    assert len(mine) == 6 and mine == pytest.approx(theirs, rel=1e-6)
    assert [row["processes"] for row in read_rows(changing.parent / "models/tiny/starts.csv")] == ["4", "3", "4"]
    assert mine[:2] == theirs[:2], "one size: the same bits"


def test_the_batch_stays_and_the_micro_batch_shrinks_only_if_memory_demands_it(tmp_path: Path) -> None:
    train = {**RUN["train"], "micro_batch_size": 4, "global_batch_size": 32}
    settings = settings_of(make_run(tmp_path, **{**RUN, "train": train}))

    def layout(start: Settings) -> tuple[int, int, int]:
        experiment = start.models["tiny"]
        return experiment.parallel.data, experiment.train.micro_batch_size, experiment.accumulation

    assert process_counts("tiny", settings.models["tiny"], settings.cluster) == [4, 2]
    assert layout(settings) == (4, 4, 2) and on_processes(settings, "tiny", 4) is settings
    assert layout(on_processes(settings, "tiny", 2)) == (2, 4, 4)
    assert on_processes(settings, "tiny", 3) is settings, "32 samples do not divide by 3"
    large = cpu_machine(2, 2 << 40, 1e12)
    whole = predict(on_processes(settings, "tiny", 2, large).models["tiny"], large).own_bytes
    tight = cpu_machine(2, int(2 * 0.99 * whole), 1e12)
    data, micro, accumulation = layout(on_processes(settings, "tiny", 2, tight))
    assert data * micro * accumulation == 32 and micro < 4
