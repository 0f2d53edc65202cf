"""A training that cannot fit is refused in one line that leads to one that can; `parallel: auto`
becomes a layout.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config import validate, with_overrides, write_settings
from common.errors import ConfigError
from common.settings import Settings
from training.planning.fit import check_fits, gib, prepare, resolve
from training.planning.layout import Layout, PlanRequest, Workload
from training.planning.machines import Machine, machine, machine_of_job
from training.planning.search import predict, search, smallest

H100 = machine("h100", {}, 8)
SLURM = {"executor": "slurm", "gpus_per_node": 8}


def raw(parallel: object, cluster: object = None, run: Path = Path("run"), **train: Any) -> dict[str, Any]:
    """A configuration with one model, `m`, of 308M parameters."""
    model = {"n_layer": 24, "n_head": 16, "n_embd": 1024, "vocab_size": 2048}
    train = {"iterations": 1000, "global_batch_size": 512, **train}
    section = {"model": model, "parallel": parallel, "train": train}
    return {"run": str(run), "urls": ["-"], "models": {"m": section}, "cluster": cluster or {}}


def settings(parallel: object, *given: Any, **train: Any) -> Settings:
    return validate(raw(parallel, *given, **train), "test")


GIVEN = settings({"data": 8}, micro_batch_size=8)


def sized(share: float) -> Machine:
    """An H100 of such a memory that GIVEN takes this share of it."""
    return replace(H100, memory=int(predict(GIVEN.models["m"], H100).memory_bytes / share))


def refusal(found: Machine, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check_fits(GIVEN, "m", found, **options)
    message = str(error.value)
    assert "\n" not in message and message.startswith("models.m ") and "train.allow_tight=true" in message
    return message


@pytest.mark.parametrize("share", [0.921, 1.5, 2.5])
def test_following_a_refusal_leads_to_a_layout_that_fits(share: float) -> None:
    message = refusal(sized(share))
    prediction = predict(GIVEN.models["m"], sized(share))
    assert gib(prediction.memory_bytes) in message and gib(sized(share).memory) in message
    *keys, _anyway = re.findall(r"[a-z]+\.\w+=\w+", message)
    assert keys, message
    changed = validate(with_overrides(raw({"data": 8}, micro_batch_size=8), keys, "m"), "test")
    check_fits(changed, "m", sized(share))
    assert (changed.models["m"].world_size, changed.models["m"].train.global_batch_size) == (8, 512)


def test_a_feasible_or_finished_run_is_silent_and_a_tight_or_allowed_one_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_fits(GIVEN, "m", sized(0.799))
    refusal(sized(3), done=999)
    check_fits(GIVEN, "m", sized(3), done=1000)
    assert capsys.readouterr().err == ""
    allowed = settings({"data": 8}, micro_batch_size=8, allow_tight=True)
    for tight, share in ((GIVEN, 0.801), (GIVEN, 0.919), (allowed, 3)):
        check_fits(tight, "m", sized(share))
        assert re.fullmatch(r"note: models\.m .*\n", capsys.readouterr().err)


def test_jobs_on_slurm_are_judged_by_what_is_known_of_their_nodes() -> None:
    for cluster in (SLURM, {"executor": "slurm"}, {"executor": "slurm", "mem_gb_per_task": 99}):
        given = settings({"data": 8}, cluster)
        assert prepare(given, "m") is given
    given = settings({"data": 8}, {**SLURM, "gpu": "h100"})
    found = machine_of_job(given.models["m"], given.cluster)
    assert found is not None and (found.name, found.per_node) == ("h100", 8)
    with pytest.raises(ConfigError, match=r"cluster\.mem_gb_per_task"):
        prepare(settings({"data": 8}, {"executor": "slurm", "mem_gb_per_task": 1}, micro_batch_size=8), "m")


# ---------------------------------------------------------------------------- parallel: auto


def test_the_planners_first_choice_becomes_the_layout(tmp_path: Path) -> None:
    chosen = resolve(settings("auto", None, tmp_path), "m", H100, 8)
    experiment = chosen.models["m"]
    best = search(Workload.of(experiment, H100), H100, PlanRequest(8, 512))[0]
    assert Layout.of(experiment) == best.layout and not experiment.parallel.auto
    assert (experiment.world_size, experiment.train.global_batch_size) == (8, 512)
    assert validate(chosen.model_dump(mode="json"), "written") == chosen
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_run_that_goes_on_keeps_its_layout_and_one_that_is_given_stays(tmp_path: Path) -> None:
    earlier = settings({"data": 4, "zero_stage": 2}, None, tmp_path, micro_batch_size=2, recompute="full")
    write_settings(earlier, tmp_path / "models/m/settings.yaml")
    began = Layout.of(earlier.models["m"])
    again = resolve(settings("auto", None, tmp_path, iterations=9999), "m", H100, 4).models["m"]
    assert Layout.of(again) == began and again.train.iterations == 9999
    for processes, train in ((8, {}), (4, {"global_batch_size": 128}), (4, {"micro_batch_size": 4})):
        again = resolve(settings("auto", None, tmp_path, **train), "m", H100, processes).models["m"]
        assert Layout.of(again) != began and again.world_size == processes, "planned again"
    given = settings({"tensor": 4}, None, tmp_path)
    assert resolve(given, "m", H100, 4) is given


def test_where_nothing_fits_the_error_names_the_key_that_starts_it_anyway() -> None:
    given = settings("auto")
    least = smallest(Workload.of(given.models["m"], H100), H100, PlanRequest(2, 512))
    assert least is not None
    small = replace(H100, memory=int(least.memory_bytes / 1.2))
    with pytest.raises(ConfigError, match=r"2 GPUs.*train\.allow_tight"):
        resolve(given, "m", small, 2)
    assert Layout.of(resolve(settings("auto", allow_tight=True), "m", small, 2).models["m"]) == least.layout


def test_a_job_has_as_many_processes_as_asked_for_or_as_a_node() -> None:
    assert prepare(settings("auto", {**SLURM, "gpu": "h100"}), "m").models["m"].world_size == 8
    asked = {"auto": True, "gpus": 16}
    assert prepare(settings(asked, {**SLURM, "gpu": "h100"}), "m").models["m"].world_size == 16
    unknown = settings(asked, SLURM)
    assert prepare(unknown, "m") is unknown, "only the job can know its GPUs"
