import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from cluster.jobs import Job, is_alive, log_tail, read_job, write_job
from cluster.submit import describe, job_parameters, submit, wait
from common.config import validate
from common.errors import ConfigError, InputError, JobError
from common.settings import Settings
from tests.conftest import Command
from tests.helpers import assert_one_line_error


def settings(folder: Path, **cluster: object) -> Settings:
    """One model of 16 processes."""
    model = {
        "model": {"n_layer": 2, "n_head": 4, "n_embd": 8, "seq_len": 8},
        "parallel": {"tensor": 2, "data": 8},
        "train": {"iterations": 2, "micro_batch_size": 1},
    }
    raw = {"run": str(folder), "urls": ["x"], "models": {"tiny": model}, "cluster": cluster}
    return validate(raw, "test")


def local_shard(folder: Path) -> Settings:
    """The same model as one process; without a dataset, so that its training fails immediately."""
    raw = settings(folder).model_dump(mode="json")
    raw["models"]["tiny"]["parallel"] = {"tensor": 1, "data": 1}
    return validate(raw, "test")


def parameters(settings: Settings) -> dict[str, Any]:
    return job_parameters("tiny", settings.models["tiny"], settings.cluster)


def test_ranks_become_one_task_a_gpu_on_whole_nodes(tmp_path: Path) -> None:
    asked = parameters(
        settings(tmp_path, executor="slurm", gpus_per_node=8, mem_gb_per_task=4, partition="p", account="a")
    )
    assert (asked["nodes"], asked["tasks_per_node"], asked["slurm_gres"]) == (2, 8, "gpu:8")
    assert (asked["slurm_partition"], asked["slurm_account"], asked["mem_gb"]) == ("p", "a", 32)
    assert asked["slurm_srun_args"] == ["--kill-on-bad-exit=1", "--cpus-per-task=1"]
    small = parameters(settings(tmp_path, executor="slurm", gpus_per_node=4))
    assert (small["nodes"], small["tasks_per_node"]) == (4, 4)


def test_layouts_that_do_not_fit_the_nodes_are_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.tiny\.parallel asks for 16 processes.*nodes of 6"):
        parameters(settings(tmp_path, executor="slurm", gpus_per_node=6))
    with pytest.raises(ConfigError, match=r"cluster\.executor is local"):
        parameters(settings(tmp_path, executor="local"))


def test_the_plan_names_what_would_be_submitted(tmp_path: Path) -> None:
    text = describe(settings(tmp_path, executor="slurm", gpus_per_node=8), "tiny")
    assert re.search("^processes +16$", text, re.M) and re.search("^slurm_gres +gpu:8$", text, re.M)


def test_slurm_without_its_commands_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="srun: no such command"):
        submit(settings(tmp_path, executor="slurm", gpus_per_node=8), "tiny")


@pytest.fixture
def sleeper() -> "subprocess.Popen[bytes]":
    """A process that looks like submitit's controller of the logs in LOGS."""
    code = "import time; time.sleep(60)"
    return subprocess.Popen([sys.executable, "-c", code, "submitit.local._local", "LOGS"])


def test_a_living_job_is_found_again_and_not_submitted_twice(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        job = Job(id=str(sleeper.pid), executor="local", logs="LOGS")
        run = tmp_path / "models" / "tiny"
        write_job(run, job)
        while "LOGS" not in psutil.Process(sleeper.pid).cmdline():
            time.sleep(0.01)  # between fork and exec the child still has our command line
        assert submit(local_shard(tmp_path), "tiny") == job == read_job(run)
        assert "not submitted again" in capsys.readouterr().out
        other = Job(id=str(os.getpid()), executor="local", logs="LOGS")
        assert is_alive(job) and not is_alive(other), "another process with the same number is not our job"
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not is_alive(job)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running")  # a job outlives the handle on it
def test_a_job_that_fails_is_reported_with_its_log(tmp_path: Path) -> None:
    ours = local_shard(tmp_path)
    job = submit(ours, "tiny")
    with pytest.raises(JobError) as error:
        wait("tiny", ours.model_folder("tiny"), job)
    path, lines = log_tail(job)
    assert path is not None and str(path) in str(error.value)
    assert "corpus_text_document.idx: no such file" in str(error.value)
    assert not any("Traceback" in line for line in lines)


def test_a_damaged_record_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"number": 3}')
    with pytest.raises(InputError, match=r"job\.json: not a job record"):
        read_job(tmp_path)


def test_status_lists_runs_with_state_losses_and_speed(tmp_path: Path, command: Command) -> None:
    run = tmp_path / "results" / "x" / "models" / "tiny"
    run.mkdir(parents=True)
    (run / "train.csv").write_text("iteration,lm_loss,tokens_per_second,mfu\n10,9.5,1000.5,\n20,7.5,2000.4,0.4123\n")
    write_job(run, Job(id="999999999", executor="local", logs="LOGS"))
    result = command("cluster.status", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout.splitlines()[1].split() == [
        "results/x/models/tiny",
        "999999999",
        "ended",
        "early",
        "20",
        "7.5000",
        "-",
        "2000",
        "41.23",
    ]
    (run / "done.json").write_text('{"iteration": 20}')
    assert "done" in command("cluster.status", run).stdout
    assert_one_line_error(command("cluster.status", tmp_path / "none"), "none: no such model folder")


def test_the_command_names_a_wrong_model(tmp_path: Path, command: Command) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings(tmp_path).model_dump(mode="json")))
    result = command("cluster.submit", "--config", tmp_path / "config.yaml", "--model", "tinny")
    assert_one_line_error(result, "no model 'tinny'", "'tiny'")
