import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from submitit.helpers import DelayedSubmission

from cluster import TrainingJob, submission
from cluster.executors import job_name
from cluster.jobs import Job, query_jobs, read_job, read_state, write_job
from cluster.submission import make_snapshot
from cluster.submit import describe, main, submit
from common.config import load_settings
from common.errors import ConfigError, JobError
from common.settings import Settings
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import model_folder, settings, write_settings
from tests.conftest import ROOT
from tests.helpers import assert_one_line_error, called, wait_for


def script(folder: Path, **cluster: object) -> str:
    """The batch script of a model of 16 processes."""
    return describe(settings(folder, executor="slurm", **cluster), "tiny")


def directives(text: str) -> dict[str, str]:
    """The #SBATCH lines of a batch script, by option."""
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    options = (" ".join(shlex.split(line)[1:]).removeprefix("--") for line in lines)  # sbatch removes quotes, too
    return {key: value for key, _, value in (option.partition("=") for option in options)}


def srun(text: str) -> list[str]:
    """The words of the only srun of a batch script."""
    (line,) = (shlex.split(line) for line in text.splitlines() if line.startswith("srun "))
    return line


def test_ranks_become_one_task_per_gpu_on_whole_nodes_or_the_keys_are_named(tmp_path: Path) -> None:
    for per_node, nodes in ((8, "2"), (4, "4")):
        asked = directives(script(tmp_path, gpus_per_node=per_node))
        assert (asked["nodes"], asked["ntasks-per-node"], asked["gres"]) == (nodes, str(per_node), f"gpu:{per_node}")
    with pytest.raises(ConfigError, match=r"models\.tiny\.parallel .* 16 .* 6"):
        script(tmp_path, gpus_per_node=6)
    with pytest.raises(ConfigError, match=r"cluster\.executor"):
        submit(settings(tmp_path, executor="local"), "tiny")
    assert list(tmp_path.iterdir()) == [], "an error of the configuration writes no file"


def test_every_key_of_a_site_becomes_its_directive_and_is_absent_by_default(tmp_path: Path) -> None:
    keys = {"partition": "gpu", "account": "p123", "qos": "high", "constraint": "a100&nvlink", "reservation": "today"}
    more = {"exclusive": True, "sbatch": ["--mail-type=END"], "mem_gb_per_task": 4, "cpus_per_task": 6}
    wanted = {**keys, "exclusive": "", "mail-type": "END", "mem": "32G", "cpus-per-task": "6", "signal": "USR2@120"}
    asked = directives(script(tmp_path, **keys, **more, signal_seconds=120))
    assert {key: asked[key] for key in wanted} == wanted
    always = "cpus-per-task job-name nodes ntasks-per-node open-mode output requeue signal time"
    assert set(directives(script(tmp_path))) == set(always.split())
    assert (asked["time"], directives(script(tmp_path))["signal"]) == ("1440", "USR2@90")
    short = settings(tmp_path, executor="slurm").model_dump(mode="json")
    short["models"]["tiny"]["time_limit_minutes"] = 2
    asked = directives(describe(Settings.model_validate(short), "tiny"))
    assert (asked["time"], asked["signal"]) == ("2", "USR2@30"), "after three quarters of its time"
    own = ["--partition=new", "--no-requeue", "--signal=TERM@60"]
    asked = directives(script(tmp_path, partition="gpu", sbatch=own))
    assert (asked["partition"], asked["signal"], asked["no-requeue"]) == ("new", "TERM@60", "")
    assert "requeue" not in asked, "options of the site win over ours"


def test_a_model_may_ask_for_other_nodes_than_the_others(tmp_path: Path, fake: FakeSlurm) -> None:
    config = write_settings(tmp_path, executor="slurm", gpus_per_node=2, partition="gpu", account="p123")
    line = ["--config", config, "--model", "tiny", "slurm.partition=h100", "slurm.gres=gpu:h100"]
    asked = directives(called(main, *line, "--dry-run").stdout)
    assert (asked["partition"], asked["gres"], asked["account"]) == ("h100", "gpu:h100:2", "p123")
    assert list(tmp_path.glob("models")) == [], "a dry run writes nothing"
    assert called(main, *line).returncode == 0
    job = read_job(model_folder(tmp_path))
    assert job is not None and load_settings(Path(job.snapshot) / "settings.yaml").cluster.partition == "h100"


def test_a_rank_gets_its_gpus_share_of_the_nodes_cores(tmp_path: Path, fake: FakeSlurm) -> None:
    nodes = [
        "CPUEfctv=96 CPUTot=128 OS=Linux 6.1 #1 Gres=gpu:h100:8(S:0-1) Partitions=gpu,all",
        "CPUTot=100 Gres=gpu:h100:8(S:0,1),shard:h100:80 Partitions=gpu",
        "CPUTot=16 Gres=gpu:a100:4 Partitions=gpu",
        "CPUTot=8 Gres=gpu:8 Partitions=all",
    ]
    fake.nodes = "\n".join([*nodes, "CPUTot=4 Gres=(null) Partitions=gpu", ""])
    eight, four = ({"gpus_per_node": number, "partition": "gpu"} for number in (8, 4))
    sites = [(eight, "12"), (four, "4"), ({**four, "gres": "gpu:h100"}, "12"), ({**eight, "cpus_per_task": 3}, "3")]
    for site, cores in [*sites, ({"gpus_per_node": 8}, "1"), ({}, "1")]:
        text = script(tmp_path, **site)
        assert directives(text)["cpus-per-task"] == cores and f"--cpus-per-task={cores}" in srun(text), site
    fake.behave(silent=True)
    assert directives(script(tmp_path, **eight))["cpus-per-task"] == "1"


def test_setup_runs_before_the_ranks_a_container_around_them_and_the_ranks_run_the_snapshot(tmp_path: Path) -> None:
    text = script(tmp_path, setup=["module load cuda"], container="apptainer exec --nv image.sif")
    assert -1 < text.index("\nmodule load cuda\n") < text.index("\nsrun ")
    folder = tmp_path / "models" / "tiny"
    command = f"-u -m submitit.core._submit {folder}/logs"
    assert " ".join(srun(text)).endswith(f" apptainer exec --nv image.sif python {command}")
    assert " ".join(srun(script(tmp_path))).endswith(f" {sys.executable} {command}")
    assert f"export PYTHONPATH={folder}/snapshots/DIGEST/code" in text and "export PYTHONSAFEPATH=1" in text
    wanted = {"--kill-on-bad-exit=1", "--open-mode=append", "--cpus-per-task=1", "--export=ALL"}
    assert wanted | {f"{folder}/logs/%j_%t_log.out"} <= set(srun(text))


def test_a_batch_script_is_valid_in_odd_folders_and_those_that_submitit_replaces_are_refused(tmp_path: Path) -> None:
    text = script(tmp_path / "my 'runs")
    body = text.replace(sys.executable, "python").partition("\nsrun ")[0]
    shown = f"python() {{ printf '%s\\n' \"$@\"; return 7; }}\n{body}\nexit 3"
    result = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=False)
    assert result.returncode == 7, result.stderr
    assert f"--folder\n{tmp_path}/my 'runs/models/tiny\n" in result.stdout and "--code\n3\n" in result.stdout
    percent = script(tmp_path / "50%x")
    logs = f"{tmp_path}/50%%x/models/tiny/logs"
    assert directives(percent)["output"] == f"{logs}/%j_0_log.out" and f"--output={logs}/%j_%t_log.out" in srun(percent)
    with pytest.raises(ConfigError, match=r"100%all/models/tiny/logs: submitit replaces %a"):
        script(tmp_path / "100%all")


def test_a_refusal_is_one_line_and_leaves_the_finished_run_alone(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_settings(tmp_path, executor="slurm", partition="none")
    done = model_folder(tmp_path) / "done.json"
    done.write_text('{"iteration": 10}')
    fake.behave(refuses="Invalid partition name specified")
    line = ["--config", config, "--model", "tiny"]
    assert_one_line_error(called(main, *line), "cluster.partition")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert_one_line_error(called(main, *line), "squeue: no such command")
    assert done.exists() and read_job(done.parent) is None
    assert [path.name for path in (done.parent / "logs").iterdir()] == ["submission.out"]


def test_slurm_runs_a_training_job_through_submitit_and_it_is_recorded(tmp_path: Path, fake: FakeSlurm) -> None:
    """Whatever a wrapper of sbatch prints, and if the submitter is killed after sbatch."""
    fake.behave(prints="Welcome! This replaces job 4711\n{};cluster")
    folder, ours = model_folder(tmp_path), settings(tmp_path, executor="slurm")
    earlier = [folder / name for name in ("done.json", "stop", "stopped")]
    for path in earlier:
        path.write_text("{}")
    job = submit(ours, "tiny")
    state, (queued,) = read_state(folder, job), fake.jobs()
    assert (queued.id, queued.name) == (job.id, job_name(ours, "tiny")) and read_job(folder) == job
    assert state is not None and state.state == "queued" and not any(path.exists() for path in earlier)
    pickle, script = (folder / "logs" / f"{job.id}_{name}" for name in ("submitted.pkl", "submission.sh"))
    found = DelayedSubmission.load(pickle).function
    assert found == TrainingJob(f"{job.snapshot}/settings.yaml", "tiny", requeue=False)
    assert script.read_text() == queued.script
    assert {*(folder / "logs").iterdir()} == {pickle, script, folder / "logs/submission.out"}
    pickle.unlink()  # a submitter that was killed after sbatch: the script itself puts it in its place
    fake.run(job.id)
    assert DelayedSubmission.load(pickle).function == found


def test_the_name_of_a_job_is_readable_and_unique_for_its_folder(tmp_path: Path) -> None:
    names = [job_name(settings(tmp_path / name), "tiny") for name in ("a/my run", "b/my run", "a/my run")]
    assert names[0] == names[2] != names[1]
    assert all(re.fullmatch(r"my_run-tiny-[0-9a-f]{8}", name) for name in names)


def test_a_living_job_is_found_again_and_not_submitted_twice(tmp_path: Path, fake: FakeSlurm) -> None:
    ours = settings(tmp_path, executor="slurm")
    job = submit(ours, "tiny")
    for state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"):
        fake.change(job.id, state=state)
        assert submit(ours, "tiny") == job
    fake.behave(silent=True)
    assert submit(ours, "tiny") == job, "a silent controller says nothing about the job"
    (model_folder(tmp_path) / "job.json").unlink()
    with pytest.raises(JobError, match="does not answer; run the same command again"):
        submit(ours, "tiny")
    fake.behave()
    assert submit(ours, "tiny").id == job.id, "nobody recorded it"
    fake.change(job.id, state="FAILED")
    assert submit(ours, "tiny") != job


def test_a_living_job_with_other_settings_is_refused_by_key(tmp_path: Path, fake: FakeSlurm) -> None:
    ours = settings(tmp_path, executor="slurm")
    job = submit(ours, "tiny")
    raw = ours.model_dump(mode="json")
    raw["models"]["tiny"]["train"]["save_interval"] = 7
    assert submit(Settings.model_validate(raw), "tiny") == job, "it changes no result"
    raw["models"]["tiny"]["train"]["lr"] = 0.5
    with pytest.raises(ConfigError, match=rf"job {job.id} .*: models\.tiny\.train\.lr \S+ -> 0\.5;"):
        submit(Settings.model_validate(raw), "tiny")
    fake.change(job.id, state="CANCELLED")
    assert submit(Settings.model_validate(raw), "tiny") != job


def test_a_finished_training_is_not_submitted_again(tmp_path: Path, fake: FakeSlurm) -> None:
    config = write_settings(tmp_path, executor="slurm")
    (model_folder(tmp_path) / "done.json").write_text('{"iteration": 20}')
    line = ["--config", config, "--model", "tiny"]
    assert called(main, *line, "--wait").returncode == 0 and fake.jobs() == []
    assert called(main, *line, "train.iterations=21").returncode == 0 and len(fake.jobs()) == 1


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small copy of the code that snapshots are made of."""
    folder = tmp_path / "sources"
    for package in submission.PACKAGES:
        (folder / package).mkdir(parents=True)
        shutil.copy(ROOT / package / "__init__.py", folder / package)
    monkeypatch.setattr(submission, "_ROOT", folder)
    return folder


def test_a_snapshot_keeps_the_code_and_the_settings_of_its_day(tmp_path: Path, sources: Path) -> None:
    (sources / ".commit").write_text("abc123")
    source = sources / "training" / "trainer.py"
    source.write_text("old")
    first = make_snapshot(settings(tmp_path / "run"), tmp_path)
    assert (first / "code" / ".commit").read_text() == "abc123"
    (sources / "training" / "__pycache__").mkdir()
    (sources / "training" / "__pycache__" / "trainer.pyc").write_bytes(b"compiled")
    assert make_snapshot(settings(tmp_path / "run"), tmp_path) == first and not list(first.rglob("__pycache__"))
    source.write_text("new")
    unfinished = make_snapshot(settings(tmp_path / "run"), tmp_path)
    killed = unfinished.with_name(f"{unfinished.name}.partial") / "new"
    killed.parent.mkdir()
    unfinished.rename(killed)
    (killed / "code" / "half.py").touch()
    second = make_snapshot(settings(tmp_path / "run"), tmp_path)
    third = make_snapshot(settings(tmp_path / "other"), tmp_path)
    assert len({first, second, third}) == 3 and not (second / "code" / "half.py").exists()
    assert [(path / "code/training/trainer.py").read_text() for path in (first, second, third)] == ["old", "new", "new"]
    assert yaml.safe_load((first / "settings.yaml").read_text())["run"] == str(tmp_path / "run")


def waits_for_the_lock(folder: Path) -> bool:
    """Whether somebody waits for the lock of the submissions of a model, while another has it."""
    inode = os.stat(folder / "models/tiny/submit.lock").st_ino
    lines = Path("/proc/locks").read_text().splitlines()
    return any("-> FLOCK" in line and f":{inode} " in line for line in lines)


def test_of_two_submissions_at_once_the_second_finds_the_job_of_the_first(tmp_path: Path, fake: FakeSlurm) -> None:
    fake.behave(holds="before")
    with ThreadPoolExecutor(2) as pool:
        both: list[Any] = [pool.submit(submit, settings(tmp_path, executor="slurm"), "tiny") for _ in range(2)]
        wait_for(lambda: fake.calls("sbatch"))
        wait_for(lambda: waits_for_the_lock(tmp_path) or len(fake.calls("sbatch")) == 2)
        fake.behave()
    assert both[0].result() == both[1].result() and len(fake.jobs()) == 1


@pytest.mark.parametrize(
    ("number", "holds"), [(signal.SIGINT, "after"), (signal.SIGKILL, "before"), (signal.SIGKILL, "after")]
)
def test_a_submission_that_is_ended_inside_sbatch_and_repeated_gives_one_job(
    tmp_path: Path, fake: FakeSlurm, number: int, holds: str
) -> None:
    config = write_settings(tmp_path, executor="slurm")
    fake.behave(holds=holds)
    line = [sys.executable, "-m", "cluster.submit", "--config", str(config), "--model", "tiny"]
    null = subprocess.DEVNULL
    first = subprocess.Popen(line, cwd=ROOT, start_new_session=True, stdout=null, stderr=null)
    wait_for(lambda: fake.calls("sbatch") and (holds == "before" or fake.jobs()))
    os.killpg(first.pid, number)  # a terminal's Ctrl-C reaches the whole group
    assert first.wait(timeout=60) == (130 if number == signal.SIGINT else -number), "it leaves while sbatch hangs"
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(submit, load_settings(config), "tiny")
        wait_for(lambda: waits_for_the_lock(tmp_path) or second.done() or len(fake.calls("sbatch")) == 2)
        fake.behave()
        job = second.result()
    assert [job.id] == [one.id for one in fake.jobs()] and read_job(model_folder(tmp_path)) == job


def test_a_controller_on_this_machine_is_told_from_another_process_with_its_number(tmp_path: Path) -> None:
    code = "import time; print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, "submitit.local._local", "LOGS"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as sleeper:
        assert sleeper.stdout is not None and sleeper.stdout.readline()
        job = Job(id=str(sleeper.pid), executor="local", logs="LOGS")
        folder = model_folder(tmp_path)
        write_job(folder, job)
        assert submit(settings(tmp_path, {"data": 1}), "tiny") == job == read_job(folder)
        assert query_jobs([job]) and not query_jobs([Job(id=str(os.getpid()), executor="local", logs="LOGS")])
        sleeper.kill()
        sleeper.wait()
    assert not query_jobs([job])
