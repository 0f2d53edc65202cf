"""`parallel: auto` becomes the planner's layout, and a run that goes on keeps the one that it began with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config import validate, write_settings
from common.errors import ConfigError
from common.settings import Settings
from training.planning.fit import prepare, resolve
from training.planning.layout import Layout, PlanRequest, Workload
from training.planning.machines import machine
from training.planning.search import search, smallest

H100 = machine("h100", {}, 8)
MODEL = {"n_layer": 8, "n_head": 8, "n_embd": 512}


def settings(folder: Path, parallel: object = "auto", cluster: object = None, **train: Any) -> Settings:
    train = {"iterations": 9, "global_batch_size": 64, **train}
    model = {"model": MODEL, "parallel": parallel, "train": train}
    return validate({"run": str(folder), "urls": ["-"], "models": {"m": model}, "cluster": cluster or {}}, "test")


def run_began(folder: Path) -> Layout:
    """A model folder whose run had this layout."""
    given = settings(folder, {"data": 4, "zero_stage": 2}, micro_batch_size=2, recompute="full")
    write_settings(given, folder / "models/m/settings.yaml")
    return Layout.of(given.models["m"])


def test_the_planners_first_choice_becomes_the_layout(tmp_path: Path) -> None:
    given = settings(tmp_path)
    chosen = resolve(given, "m", H100, 8)
    experiment = chosen.models["m"]
    best = search(Workload.of(experiment, H100), H100, PlanRequest(8, 64))[0]
    assert Layout.of(experiment) == best.layout and not experiment.parallel.auto
    assert (experiment.world_size, experiment.train.global_batch_size) == (8, 64)
    assert validate(chosen.model_dump(mode="json"), "written") == chosen
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_run_that_goes_on_keeps_its_layout_and_one_that_is_given_stays(tmp_path: Path) -> None:
    began = run_began(tmp_path)
    again = resolve(settings(tmp_path, iterations=99), "m", H100, 4).models["m"]
    assert Layout.of(again) == began and again.train.iterations == 99
    given = settings(tmp_path, {"tensor": 4})
    assert resolve(given, "m", H100, 4) is given


def test_a_run_that_goes_on_otherwise_is_planned_again(tmp_path: Path) -> None:
    began = run_began(tmp_path)
    for processes, train in ((8, {}), (4, {"global_batch_size": 128}), (4, {"micro_batch_size": 4})):
        again = resolve(settings(tmp_path, **train), "m", H100, processes).models["m"]
        assert Layout.of(again) != began and again.world_size == processes


def test_where_nothing_fits_the_error_names_the_key_that_starts_it_anyway(tmp_path: Path) -> None:
    given = settings(tmp_path)
    least = smallest(Workload.of(given.models["m"], H100), H100, PlanRequest(2, 64))
    assert least is not None
    small = replace(H100, memory=int(least.memory_bytes / 1.2))
    with pytest.raises(ConfigError, match=r"2 GPUs.*train\.allow_tight"):
        resolve(given, "m", small, 2)
    assert Layout.of(resolve(settings(tmp_path, allow_tight=True), "m", small, 2).models["m"]) == least.layout


def test_a_job_has_as_many_processes_as_asked_for_or_as_a_node(tmp_path: Path) -> None:
    slurm = {"executor": "slurm", "gpus_per_node": 4, "gpu": "h100"}
    assert prepare(settings(tmp_path, cluster=slurm), "m").models["m"].world_size == 4
    assert prepare(settings(tmp_path, {"auto": True, "gpus": 16}, slurm), "m").models["m"].world_size == 16
    unknown = settings(tmp_path, {"auto": True, "gpus": 16}, {**slurm, "gpu": ""})
    assert prepare(unknown, "m") is unknown, "only the job can know its GPUs"
