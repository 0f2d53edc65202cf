"""A training that cannot fit is refused in one line that leads to one that can; everything else starts."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config import validate, with_overrides
from common.errors import ConfigError
from common.settings import Settings
from training.planning import machines
from training.planning.fit import check_fits, gib, predict, prepare
from training.planning.machines import GIB, Machine, available_memory, machine, machine_of_job

MODEL = {"n_layer": 24, "n_head": 16, "n_embd": 1024, "vocab_size": 2048}
TRAIN = {"iterations": 1000, "micro_batch_size": 8, "global_batch_size": 512}


def raw(parallel: object, **cluster: object) -> dict[str, Any]:
    """A configuration with the 345M model, `medium`."""
    medium = {"model": MODEL, "parallel": parallel, "train": TRAIN}
    return {"run": "run", "urls": ["-"], "models": {"medium": medium}, "cluster": cluster}


def settings(parallel: object, **cluster: Any) -> Settings:
    return validate(raw(parallel, **cluster), "test")


def sized(given: Settings, share: float) -> Machine:
    """An H100 of such a memory that the model takes this share of it."""
    h100 = machine("h100", {}, 8)
    return replace(h100, memory=int(predict(given.models["medium"], h100).memory_bytes / share))


def refusal(given: Settings, found: Machine, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check_fits(given, "medium", found, **options)
    message = str(error.value)
    assert "\n" not in message and message.startswith("models.medium ") and "train.allow_tight=true" in message
    return message


def followed(message: str) -> Settings:
    """The settings with the keys that a refusal proposes instead of train.allow_tight."""
    *keys, _anyway = re.findall(r"[a-z]+\.\w+=\w+", message)
    assert keys, message
    return validate(with_overrides(raw({"data": 8}), keys, "medium"), "test")


@pytest.mark.parametrize("share", [0.921, 1.5, 2.5])
def test_following_a_refusal_leads_to_a_layout_that_fits(share: float) -> None:
    given = settings({"data": 8})
    h100 = sized(given, share)
    message = refusal(given, h100)
    prediction = predict(given.models["medium"], h100)
    assert gib(prediction.memory_bytes) in message and gib(h100.memory) in message
    changed = followed(message)
    check_fits(changed, "medium", h100)
    assert (changed.models["medium"].world_size, changed.models["medium"].train.global_batch_size) == (8, 512)


def test_a_feasible_layout_is_silent_and_a_tight_or_allowed_one_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    given = settings({"data": 8})
    check_fits(given, "medium", sized(given, 0.799))
    assert capsys.readouterr().err == ""
    allowed = raw({"data": 8})
    allowed["models"]["medium"]["train"] = {**TRAIN, "allow_tight": True}
    for tight, share in ((given, 0.801), (given, 0.919), (validate(allowed, "test"), 3)):
        check_fits(tight, "medium", sized(given, share))
        assert re.fullmatch(r"note: models\.medium .*\n", capsys.readouterr().err)


def test_a_finished_run_is_not_refused() -> None:
    given = settings({"data": 8})
    refusal(given, sized(given, 3), done=999)
    check_fits(given, "medium", sized(given, 3), done=1000)


def test_jobs_on_slurm_are_judged_by_what_is_known_of_their_nodes() -> None:
    values = {"executor": "slurm", "gpus_per_node": 8}
    for cluster in (values, {"executor": "slurm"}, {"executor": "slurm", "mem_gb_per_task": 99}):
        given = settings({"data": 8}, **cluster)
        assert prepare(given, "medium") is given
    given = settings({"data": 8}, **values, gpu="h100")
    found = machine_of_job(given.models["medium"], given.cluster)
    assert found is not None and (found.name, found.per_node) == ("h100", 8)
    with pytest.raises(ConfigError, match=r"cluster\.mem_gb_per_task"):
        prepare(settings({"data": 8}, executor="slurm", mem_gb_per_task=1), "medium")


def test_memory_is_what_control_groups_and_slurm_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "memory/c").mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("5:cpu:/x\n4:memory:/c/gone\n0::/a/b\n")
    (tmp_path / "a/b/memory.max").write_text("max\n")
    (tmp_path / "a/memory.max").write_text("7000\n")
    (tmp_path / "memory/c/memory.limit_in_bytes").write_text("5000\n")
    assert sorted(machines._cgroup_limits(tmp_path, own)) == [5000, 7000]
    monkeypatch.setattr(machines, "_cgroup_limits", lambda: [2**62])
    whole = available_memory({})
    job = {"SLURM_JOB_ID": "1"}
    assert whole > GIB and available_memory({"SLURM_MEM_PER_NODE": "5"}) == whole, "no job"
    assert available_memory({**job, "SLURM_MEM_PER_NODE": "5"}) == 5 << 20
    assert available_memory({**job, "SLURM_MEM_PER_NODE": "0"}) == whole
    assert available_memory({**job, "SLURM_MEM_PER_CPU": "5", "SLURM_CPUS_ON_NODE": "4"}) == 20 << 20
