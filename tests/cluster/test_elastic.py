"""cluster.min_nodes: the batch script, the numbers of nodes, how a job waits and grows."""

import subprocess
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from cluster import elastic, status, submit
from cluster.elastic import Patience, grow
from cluster.jobs import Job, query_jobs, write_job
from cluster.submission import make_snapshot
from common.config import settings_text
from common.errors import ConfigError, InputError
from common.settings import Settings
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import model_folder, settings, slurm_job
from tests.cluster.test_submit import directives, script, srun
from tests.helpers import called
from training import plan
from workflow.checks import check_model

FOUR = {"tasks_per_node": 4, "min_nodes": 2}
"""Four nodes: tensor 2, data 8, a global batch of 8, which divides over 4, 2 and 1 nodes."""


def elastic_job(folder: Path, fake: FakeSlurm, **values: object) -> Job:
    """A job on four nodes or two, recorded with its snapshot."""
    kinds = {key: values.pop(key) for key in ("shrink_after_minutes", "min_nodes") if key in values}
    snapshot = make_snapshot(settings(folder, executor="slurm", **FOUR | kinds), model_folder(folder))
    job = replace(slurm_job(model_folder(folder), fake, **values), snapshot=str(snapshot))
    write_job(model_folder(folder), job)
    return job


def test_a_range_of_nodes_has_one_large_task_per_node_and_srun_starts_the_ranks(tmp_path: Path) -> None:
    text = script(tmp_path, **FOUR | {"cpus_per_task": 3, "gpus_per_node": 4})
    asked = directives(text)
    assert (asked["nodes"], asked["cpus-per-task"], asked["gres"]) == ("2-4", "12", "gpu:4")
    assert "ntasks-per-node" not in asked, "a requeued job would keep its number of nodes"
    assert {"--ntasks-per-node=4", "--cpus-per-task=3"} <= set(srun(text))
    assert directives(script(tmp_path, **FOUR, shrink_after_minutes=5))["nodes"] == "4"
    fixed = directives(script(tmp_path, **FOUR | {"min_nodes": 0}))
    assert (fixed["nodes"], fixed["ntasks-per-node"]) == ("4", "4")
    assert directives(script(tmp_path, **FOUR | {"min_nodes": 4})) == fixed, "there is nothing to choose"


@pytest.mark.parametrize(("given", "used"), [(4, 4), (3, 2), (2, 2)])
def test_nodes_over_which_the_batch_does_not_divide_are_given_back(tmp_path: Path, given: int, used: int) -> None:
    text = script(tmp_path, **FOUR)
    body = text[text.index("for nodes in") : text.index("# The shell outlives")]
    (tmp_path / "models/tiny/logs").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    writes = "touch slurm_job_7_resize.sh slurm_job_7_resize.csh"
    (tmp_path / "bin/scontrol").write_text(f'#!/bin/bash\necho "$@" >&2\n{writes}\n')
    (tmp_path / "bin/scontrol").chmod(0o755)
    slurm = f"PATH={tmp_path}/bin:$PATH SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES={given}"
    shown = f"{slurm}\n{body}\necho $SLURM_NNODES $SLURM_NTASKS"
    result = subprocess.run(["bash", "-euc", shown], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == f"{used} {4 * used}"
    assert result.stderr == ("update JobId=7 NumNodes=2\n" if used < given else "")
    assert list((tmp_path / "models/tiny/logs").iterdir()) == []


def test_what_min_nodes_cannot_do_is_one_line(tmp_path: Path) -> None:
    for change, message in (
        ({"executor": "local", "tasks_per_node": 16, "min_nodes": 1}, "needs cluster.executor slurm"),
        ({"min_nodes": 3}, r"global_batch_size 8 divides over no number of nodes from 3 to 3 .*; it divides over 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            submit.describe(settings(tmp_path, **{"executor": "slurm", **FOUR, **change}), "tiny")
    raw = settings(tmp_path, {"data": 8}, executor="slurm", **FOUR).model_dump(mode="json")
    raw["models"]["tiny"]["parallel"] = {"auto": True, "gpus": 16}
    with pytest.raises(ConfigError, match=r"parallel is auto and chosen when the job starts; set cluster\.gpu"):
        submit.describe(Settings.model_validate(raw), "tiny")


def test_a_waiting_job_accepts_fewer_nodes_after_its_minutes_and_again_after_a_restart(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: now[0])
    job = elastic_job(tmp_path, fake, shrink_after_minutes=2, min_nodes=1, state="PENDING")
    patience, seen = Patience(job, "tiny"), []
    fake.nodes = "State=IDLE Partitions=main\n" * 3
    polls = [(10, "PENDING"), (100, "PENDING"), (140, "PENDING"), (200, "PENDING"), (260, "RUNNING"), (300, "PENDING")]
    for seconds, state in polls:
        now[0] = seconds
        fake.change(job.id, state=state)
        patience.look(query_jobs([job]).get(job.id))
        seen.append(fake.job(job.id).asked.get("nodes"))
    assert seen == ["4", "4", "2", "1", "1", "4"], (
        "two of three idle nodes are usable; after a minute without a start, one"
    )
    fake.nodes = ""
    now[0] = 500
    patience.look(query_jobs([job]).get(job.id))
    assert fake.job(job.id).asked["nodes"] == "1", "no node is idle: the first that comes"


def test_without_a_process_that_waits_a_job_takes_fewer_nodes_at_once(tmp_path: Path, fake: FakeSlurm) -> None:
    waiting, alone = (settings(tmp_path / name, executor="slurm", **FOUR, shrink_after_minutes=9) for name in "ab")
    asked = [
        fake.job(submit.submit(one, "tiny", waits).id).asked["nodes"]
        for one, waits in ((waiting, True), (alone, False))
    ]
    assert asked == ["4", "2-4"]


def test_a_running_job_grows_only_when_asked_and_if_enough_nodes_are_idle(tmp_path: Path, fake: FakeSlurm) -> None:
    job = elastic_job(tmp_path, fake, nodes="node1,node2")
    fake.nodes = "State=IDLE Partitions=main\nState=IDLE+DRAIN Partitions=main\nState=IDLE Partitions=other\n"
    assert grow(model_folder(tmp_path), "tiny").endswith("has 2 of 4 nodes, and 1 more are idle; it stays")
    assert fake.calls("scancel") == []
    fake.nodes += "State=IDLE Partitions=main,all\n"
    assert grow(model_folder(tmp_path), "tiny").endswith("it saves and starts again on 4")
    assert fake.calls("scancel") == [["scancel", "--signal=USR2", job.id]]
    fake.change(job.id, state="PENDING")
    with pytest.raises(InputError, match="only a running job can grow"):
        grow(model_folder(tmp_path), "tiny")


def test_status_and_plan_say_how_many_nodes_there_are(tmp_path: Path, fake: FakeSlurm) -> None:
    elastic_job(tmp_path, fake, nodes="node1,node2")
    (model_folder(tmp_path) / "starts.csv").write_text("iteration,time,processes\n0,1,16\n10,2,8\n")
    assert "running (2 of 4 nodes, 50 % slower than planned)" in called(status.main, model_folder(tmp_path)).stdout
    config = tmp_path / "config.yaml"
    config.write_text(settings_text(settings(tmp_path, executor="slurm", **FOUR)))
    shown = called(submit.main, "--config", config, "--model", "tiny", "--dry-run")
    assert shown.stderr == "note: tiny: 8 to 16 processes\n"
    line = ("--config", config, "--model", "tiny", "--given", "--gpu", "h100")
    layouts = orjson.loads(called(plan.main, *line, "--gpus-per-node", "4", "--json").stdout)["layouts"]
    assert [layout["layout"]["data"] for layout in layouts] == [8, 4]


def test_a_dry_run_of_the_workflow_says_how_many_processes_there_may_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_model(settings(tmp_path, executor="slurm", **FOUR), "tiny")
    assert capsys.readouterr().err == "note: models.tiny: 8 to 16 processes, by cluster.min_nodes\n"
