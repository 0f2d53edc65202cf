import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cluster.jobs import Job, look, read_job, read_state, write_job
from cluster.submit import describe, job_name, main, submit
from common.config import load_settings, validate
from common.errors import ConfigError, InputError
from common.settings import Settings
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import model_folder, settings, write_settings
from tests.conftest import ROOT, Command
from tests.helpers import assert_one_line_error
from tests.training.helpers import wait_for


def script(folder: Path, **cluster: object) -> str:
    """The batch script of a model of 16 processes."""
    return describe(settings(folder, executor="slurm", **cluster), "tiny")


def directives(text: str) -> dict[str, str]:
    """The #SBATCH lines of a batch script, by option."""
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    options = (" ".join(shlex.split(line)[1:]).removeprefix("--") for line in lines)  # sbatch removes quotes, too
    return {key: value for key, _, value in (option.partition("=") for option in options)}


def test_ranks_become_one_task_a_gpu_on_whole_nodes(tmp_path: Path) -> None:
    asked = directives(script(tmp_path, gpus_per_node=8))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gres"]) == ("2", "8", "gpu:8")
    small = directives(script(tmp_path, gpus_per_node=4))
    assert (small["nodes"], small["ntasks-per-node"], small["gres"]) == ("4", "4", "gpu:4")
    assert "gres" not in directives(script(tmp_path))


def test_layouts_that_do_not_fit_the_nodes_are_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.tiny\.parallel asks for 16 processes.*nodes of 6"):
        script(tmp_path, gpus_per_node=6)
    with pytest.raises(ConfigError, match=r"cluster\.executor is local"):
        submit(settings(tmp_path, executor="local"), "tiny")
    assert list(tmp_path.iterdir()) == [], "an error of the configuration writes no file"


def planned(folder: Path, parallel: object, **cluster: object) -> Settings:
    """A model of 32 layers x 4,096, on nodes of 8 H100 unless `cluster` says otherwise."""
    raw = settings(folder).model_dump(mode="json")
    model = {"n_layer": 32, "n_head": 32, "n_embd": 4096, "seq_len": 2048}
    train = {"iterations": 20, "global_batch_size": 64}
    raw["models"]["tiny"] |= {"model": model, "parallel": parallel, "train": train}
    return validate(raw | {"cluster": {"executor": "slurm", "gpus_per_node": 8, "gpu": "h100", **cluster}}, "test")


def test_a_model_that_is_too_large_for_its_gpus_is_not_queued(tmp_path: Path, fake: FakeSlurm) -> None:
    too_large = planned(tmp_path, {})  # 6.6 B parameters of 16 bytes
    says = r"models\.tiny needs \d+\.\d GiB per GPU and there are 79\..*; .* or set train\.allow_tight=true"
    with pytest.raises(ConfigError, match=says):
        submit(too_large, "tiny")
    with pytest.raises(ConfigError, match=says):
        describe(too_large, "tiny")
    assert fake.jobs() == [] and not (tmp_path / "models").exists()
    assert "#SBATCH --nodes=1" in describe(planned(tmp_path, {}, gpu=""), "tiny"), "the job checks its own GPUs"


def test_a_job_gets_the_layout_that_the_planner_chose(
    tmp_path: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit(planned(tmp_path, {"auto": True, "gpus": 16}), "tiny")
    chosen = load_settings(Path(job.snapshot) / "settings.yaml").models["tiny"]
    assert (chosen.parallel.auto, chosen.world_size, chosen.train.global_batch_size) == (False, 16, 64)
    asked = directives(fake.job(job.id).script)
    assert (asked["nodes"], asked["ntasks-per-node"]) == ("2", "8")
    assert "(16 processes)" in capsys.readouterr().out


def test_a_job_on_unknown_gpus_chooses_its_layout_itself(tmp_path: Path, fake: FakeSlurm) -> None:
    job = submit(planned(tmp_path, "auto", gpu=""), "tiny")
    assert load_settings(Path(job.snapshot) / "settings.yaml").models["tiny"].parallel.auto
    assert directives(fake.job(job.id).script)["ntasks-per-node"] == "8", "one node"


def test_what_a_site_asks_is_absent_by_default(tmp_path: Path) -> None:
    asked = directives(script(tmp_path))
    always = {
        "cpus-per-task",
        "job-name",
        "nodes",
        "ntasks-per-node",
        "open-mode",
        "output",
        "requeue",
        "signal",
        "time",
    }
    assert set(asked) == always


@pytest.mark.parametrize(
    ("key", "value", "option", "text"),
    [
        ("partition", "gpu", "partition", "gpu"),
        ("account", "p123", "account", "p123"),
        ("qos", "high", "qos", "high"),
        ("constraint", "a100&nvlink", "constraint", "a100&nvlink"),
        ("reservation", "today", "reservation", "today"),
        ("exclusive", True, "exclusive", ""),
        ("sbatch", ["--mail-type=END", "--switches=1@60"], "mail-type", "END"),
        ("sbatch", ["--nice"], "nice", ""),
        ("mem_gb_per_task", 4, "mem", "32G"),
        ("cpus_per_task", 6, "cpus-per-task", "6"),
        ("signal_seconds", 120, "signal", "USR2@120"),
    ],
)
def test_every_key_of_a_site_becomes_its_directive(
    tmp_path: Path, key: str, value: object, option: str, text: str
) -> None:
    assert directives(script(tmp_path, **{key: value}))[option] == text


def test_gpus_are_spelled_as_the_site_does(tmp_path: Path) -> None:
    assert directives(script(tmp_path, gpus_per_node=8, gres="gpu:a100"))["gres"] == "gpu:a100:8"


def test_a_model_may_ask_for_other_nodes_than_the_others(
    tmp_path: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_settings(tmp_path, executor="slurm", gpus_per_node=2, partition="gpu", account="p123")
    line = ["--config", str(config), "--model", "tiny", "slurm.partition=h100", "slurm.gres=gpu:h100"]
    assert main([*line, "--dry-run"]) == 0
    asked = directives(capsys.readouterr().out)
    assert (asked["partition"], asked["gres"], asked["account"]) == ("h100", "gpu:h100:2", "p123")
    assert main(line) == 0
    job = read_job(model_folder(tmp_path))
    assert job is not None and load_settings(Path(job.snapshot) / "settings.yaml").cluster.partition == "h100"


def test_setup_commands_run_before_the_ranks_and_a_container_around_them(tmp_path: Path) -> None:
    text = script(tmp_path, setup=["module load cuda"], container="apptainer exec --nv image.sif")
    lines = text.splitlines()
    (srun,) = [number for number, line in enumerate(lines) if line.startswith("srun ")]
    assert lines.index("module load cuda") < srun
    words = shlex.split(lines[srun])
    start = words.index("apptainer")
    assert " ".join(words[start:]).startswith("apptainer exec --nv image.sif python -u -m training.train --config ")
    assert f"{sys.executable} -u -m training.train" in script(tmp_path)


def test_a_short_job_is_told_to_save_after_three_quarters_of_its_time(tmp_path: Path) -> None:
    short = settings(tmp_path, executor="slurm").model_dump(mode="json")
    short["models"]["tiny"]["time_limit_minutes"] = 2
    asked = directives(describe(Settings.model_validate(short), "tiny"))
    assert (asked["time"], asked["signal"]) == ("2", "USR2@30")


def test_the_ranks_run_the_snapshot_and_append_to_their_logs(tmp_path: Path) -> None:
    text = script(tmp_path)
    folder = tmp_path / "models" / "tiny"
    assert f"export PYTHONPATH={folder}/snapshots/DIGEST/code" in text and "export PYTHONSAFEPATH=1" in text
    (srun,) = (shlex.split(line) for line in text.splitlines() if line.startswith("srun "))
    assert {"--kill-on-bad-exit=1", "--open-mode=append", "--cpus-per-task=1"} <= set(srun)
    assert f"{folder}/snapshots/DIGEST/settings.yaml" in srun and f"{folder}/logs/%j_%t_log.out" in srun


def test_a_batch_script_is_valid_shell_in_a_folder_with_spaces(tmp_path: Path) -> None:
    text = script(tmp_path / "my 'runs")
    body = text.replace(sys.executable, "python").partition("# command")[0]
    shown = f"python() {{ printf '%s\\n' \"$@\"; return 7; }}\n{body}\nexit 3"
    result = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=False)
    assert result.returncode == 7, result.stderr
    assert f"--folder\n{tmp_path}/my 'runs/models/tiny\n" in result.stdout and "--code\n3\n" in result.stdout


def test_a_dry_run_prints_the_batch_script_or_the_processes_and_writes_nothing(
    tmp_path: Path, command: Command
) -> None:
    config = write_settings(tmp_path, executor="slurm")
    result = command("cluster.submit", "--config", config, "--model", "tiny", "--dry-run")
    assert result.stdout.startswith("#!/bin/bash\n") and result.returncode == 0
    config = write_settings(tmp_path)
    result = command("cluster.submit", "--config", config, "--model", "tiny", "--dry-run")
    assert re.search("^processes +2$", result.stdout, re.M) and "training.train" in result.stdout
    assert list(tmp_path.iterdir()) == [config]


def test_slurm_without_its_commands_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"squeue: no such command; .*login node.*cluster\.executor: local"):
        submit(settings(tmp_path, executor="slurm"), "tiny")


def test_names_are_readable_and_unique_for_the_model_folder(tmp_path: Path) -> None:
    names = [job_name(settings(tmp_path / name), "tiny") for name in ("a/my run", "b/my run", "a/my run")]
    assert names[0] == names[2] != names[1]
    assert all(re.fullmatch(r"my_run-tiny-[0-9a-f]{8}", name) for name in names)


def test_a_job_is_recorded_with_its_script_and_its_state(tmp_path: Path, fake: FakeSlurm) -> None:
    ours = settings(tmp_path, executor="slurm")
    job = submit(ours, "tiny")
    folder = tmp_path / "models" / "tiny"
    assert read_job(folder) == job
    state = read_state(folder, job)
    assert state is not None and state.state == "queued"
    assert (folder / "logs" / f"{job.id}_submission.sh").read_text() == fake.job(job.id).script
    assert fake.job(job.id).name == job_name(ours, "tiny")


def test_a_living_job_is_found_again_and_not_submitted_twice(
    tmp_path: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = settings(tmp_path, executor="slurm")
    job = submit(ours, "tiny")
    for state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"):
        fake.change(job.id, state=state)
        assert submit(ours, "tiny") == job
        assert "not submitted again" in capsys.readouterr().out
    fake.behave(silent=True)
    assert submit(ours, "tiny") == job, "a silent controller says nothing about the job"
    fake.behave()
    fake.change(job.id, state="FAILED")
    assert submit(ours, "tiny") != job


def test_a_living_job_with_other_settings_is_refused_by_key(tmp_path: Path, fake: FakeSlurm) -> None:
    ours = settings(tmp_path, executor="slurm")
    job = submit(ours, "tiny")
    raw = ours.model_dump(mode="json")
    raw["models"]["tiny"]["train"] |= {"lr": 0.5, "save_interval": 7}  # the latter changes no result
    changed = Settings.model_validate(raw)
    lr = re.escape(
        f"job {job.id} is alive with other settings: models.tiny.train.lr ({ours.models['tiny'].train.lr}, now 0.5)"
    )
    with pytest.raises(ConfigError, match=f"^{lr}; restore them, or end the job first: python -m cluster.cancel "):
        submit(changed, "tiny")
    fake.change(job.id, state="CANCELLED")
    assert submit(changed, "tiny") != job


def test_a_finished_training_is_not_submitted_again(
    tmp_path: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_settings(tmp_path, executor="slurm")
    (model_folder(tmp_path) / "done.json").write_text('{"iteration": 20}')
    line = ["--config", str(config), "--model", "tiny"]
    assert main([*line, "--wait"]) == 0 and fake.jobs() == []
    assert "tiny: finished, nothing to do" in capsys.readouterr().out
    assert main([*line, "train.iterations=30"]) == 0 and len(fake.jobs()) == 1


def test_of_two_submissions_at_once_the_second_finds_the_job_of_the_first(tmp_path: Path, fake: FakeSlurm) -> None:
    config = write_settings(tmp_path, executor="slurm")
    fake.behave(before=1)
    line = [sys.executable, "-m", "cluster.submit", "--config", str(config), "--model", "tiny"]
    both = [subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = sorted(process.communicate(timeout=60)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0] and len(fake.jobs()) == 1
    assert "not submitted again" in outputs[0] and "submitted job" in outputs[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("slow", ["before", "after"])
def test_a_submission_that_is_ended_inside_sbatch_and_repeated_gives_one_job(
    tmp_path: Path, fake: FakeSlurm, command: Command, number: int, slow: str
) -> None:
    config = write_settings(tmp_path, executor="slurm")
    fake.behave(**{slow: 2.0})
    line = [sys.executable, "-m", "cluster.submit", "--config", str(config), "--model", "tiny"]
    first = subprocess.Popen(
        line, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(lambda: fake.calls("sbatch") and (slow == "before" or fake.jobs()))
    if number == signal.SIGINT:
        os.killpg(first.pid, number)  # a terminal's Ctrl-C reaches sbatch, too
    else:
        first.kill()
    first.wait(timeout=60)
    result = command("cluster.submit", "--config", config, "--model", "tiny")
    assert result.returncode == 0, result.stderr
    assert len(fake.jobs()) == 1
    job = read_job(tmp_path / "models" / "tiny")
    assert job is not None and job.id == fake.jobs()[0].id


def test_a_job_that_slurm_refuses_is_one_line_and_leaves_the_finished_run_alone(
    tmp_path: Path, fake: FakeSlurm, command: Command
) -> None:
    config = write_settings(tmp_path, executor="slurm", partition="none")
    done = model_folder(tmp_path) / "done.json"
    done.write_text('{"iteration": 10}')
    fake.behave(refuses="Invalid partition name specified")
    result = command("cluster.submit", "--config", config, "--model", "tiny")
    assert_one_line_error(result, "Slurm refused the job: Invalid partition name specified; change cluster.partition")
    assert done.exists() and read_job(done.parent) is None


def test_files_of_an_earlier_job_go_once_slurm_has_accepted_the_new_one(tmp_path: Path, fake: FakeSlurm) -> None:
    folder = model_folder(tmp_path)
    names = ("done.json", "stop", "stopped")
    for name in names:
        (folder / name).write_text("{}")
    submit(settings(tmp_path, executor="slurm"), "tiny")
    assert not any((folder / name).exists() for name in names)


def test_a_job_that_finishes_before_sbatch_returns_keeps_its_done_json(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path)
    (folder / "done.json").write_text("{}")

    def start(*_arguments: object) -> str:
        (folder / "new.json").write_text('{"iteration": 20}')
        (folder / "new.json").replace(folder / "done.json")
        return "1000"

    monkeypatch.setattr("cluster.submission.slurm.submit", start)
    submit(settings(tmp_path, executor="slurm"), "tiny")
    assert (folder / "done.json").read_text() == '{"iteration": 20}'


def test_snapshots_that_no_job_needs_are_removed(tmp_path: Path, fake: FakeSlurm) -> None:
    jobs = []
    for gigabytes in (1, 2, 3):
        jobs.append(submit(settings(tmp_path, executor="slurm", mem_gb_per_task=gigabytes), "tiny"))
        fake.change(jobs[-1].id, state="FAILED")
        (tmp_path / "models/tiny/snapshots/of-a-person").mkdir(exist_ok=True)
    names = {path.name for path in (tmp_path / "models/tiny/snapshots").iterdir()}
    assert names == {Path(jobs[1].snapshot).name, Path(jobs[2].snapshot).name, "of-a-person"}
    write_job(tmp_path / "models/tiny", Job(jobs[-1].id, "slurm", jobs[-1].logs, jobs[-1].name))
    submit(settings(tmp_path, executor="slurm", mem_gb_per_task=4), "tiny")
    assert Path(jobs[1].snapshot).is_dir(), "nobody knows which snapshot the last job used"


@pytest.fixture
def sleeper() -> "subprocess.Popen[bytes]":
    """A process that looks like submitit's controller of the logs in LOGS."""
    code = "import time; time.sleep(60)"
    return subprocess.Popen([sys.executable, "-c", code, "submitit.local._local", "LOGS"])


def test_a_controller_on_this_machine_is_told_from_another_process_with_its_number(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]"
) -> None:
    try:
        job = Job(id=str(sleeper.pid), executor="local", logs="LOGS")
        folder = model_folder(tmp_path)
        write_job(folder, job)
        while "LOGS" not in psutil.Process(sleeper.pid).cmdline():
            time.sleep(0.01)  # between fork and exec the child still has our command line
        assert submit(settings(tmp_path, {"data": 1}), "tiny") == job == read_job(folder)
        assert look([job]) and not look([Job(id=str(os.getpid()), executor="local", logs="LOGS")])
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not look([job])


def test_the_command_names_a_wrong_model(tmp_path: Path, command: Command) -> None:
    config = write_settings(tmp_path)
    result = command("cluster.submit", "--config", config, "--model", "tinny")
    assert_one_line_error(result, "no model 'tinny'", "'tiny'")
