"""The throw-away cluster that the other tests stand on."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.slurm.lab import SYSTEM_FOLDER, Lab, missing, processes, slurm
from tests.training.helpers import wait_for

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")
LAB = [sys.executable, "-m", "tests.slurm.lab"]


def submit(lab: Lab, script: str, *options: str) -> str:
    """Submit a batch job; returns its id."""
    return lab.check("sbatch", "--parsable", f"--output={lab.folder}/%j.out", *options, "--wrap", script).strip()


def test_the_command_line_returns_the_exit_code_and_hands_out_its_gpus() -> None:
    script = "srun --nodes 2 --gres gpu:1 printenv SLURMD_NODENAME CUDA_VISIBLE_DEVICES && ls /etc/slurm && exit 7"
    outside = sorted(path.name for path in SYSTEM_FOLDER.iterdir())
    command = [*LAB, "--gpus", "2", "--", "bash", "-c", script]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 7, result.stderr
    assert sorted(result.stdout.split()) == ["0", "0", "gres.conf", "node1", "node2", "slurm.conf", "spool"]
    assert sorted(path.name for path in SYSTEM_FOLDER.iterdir()) == outside


def test_two_labs_run_side_by_side_and_share_their_mounts_with_nobody(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with slurm(tmp_path / "a", nodes=1) as one, slurm(tmp_path / "b", nodes=3, cpus=2) as other:
        one.check("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk))
        job = submit(one, f"head -c 100000 /dev/zero > {disk}/file", "--job-name=filler")
        assert one.wait_job(job, "FAILED", "COMPLETED")["JobState"] == "FAILED"
        assert "No space left on device" in (one.folder / f"{job}.out").read_text()
        assert other.check("srun", "--nodes=3", "ls", str(disk)) == "" == "".join(os.listdir(disk))
        assert "filler" not in other.check("scontrol", "show", "jobs")  # whose ids may be the same
        assert one.check("sinfo", "-h", "-o", "%D %c", "-p", "main") == "1 8\n"
        assert other.check("sinfo", "-h", "-o", "%D %c", "-p", "main") == "3 2\n"
    for lab in (one, other):
        assert not processes.of_lab(lab.folder)


@pytest.mark.skipif(bool(missing(accounting=True)), reason=missing(accounting=True) or "accounting is here")
def test_with_accounting_ended_jobs_are_known_and_wrong_accounts_are_refused(tmp_path: Path) -> None:
    with slurm(tmp_path / "lab", nodes=1, accounting=True) as lab:
        job = submit(lab, "exit 3")
        lab.wait_job(job, "FAILED")
        sacct = [
            "sacct",
            "--noheader",
            "--allocations",
            "--parsable2",
            f"--jobs={job}",
            "--format=Account,State,ExitCode",
        ]
        lab.wait(lambda: lab.check(*sacct) == "lab|FAILED|3:0\n", log="slurmdbd.log")
        refused = lab.run("sbatch", "--account=other", "--wrap", "true")
        assert refused.returncode == 1 and "Invalid account" in refused.stderr


def test_without_accounting_there_is_no_sacct(tmp_path: Path) -> None:
    with slurm(tmp_path / "lab", nodes=1) as lab:
        assert "accounting storage is disabled" in lab.run("sacct").stderr
        assert lab.run("sbatch", "--account=other", "--wrap", "true").returncode == 0


@pytest.mark.slow
def test_a_killed_node_takes_its_job_with_it_and_comes_back(tmp_path: Path) -> None:
    with slurm(tmp_path / "lab", slurmd_timeout=5) as lab:
        job = submit(lab, "trap '' TERM; sleep 1000 & wait", "--nodelist=node1")
        lab.wait_job(job, "RUNNING")
        wait_for(lambda: len(processes.of_node(lab.folder, "node1")) >= 4)  # slurmd, slurmstepd, bash, sleep
        others = processes.of_node(lab.folder, "node2")
        lab.kill_node("node1")
        assert not processes.of_node(lab.folder, "node1")
        assert processes.of_node(lab.folder, "node2") == others
        lab.wait_job(job, "PENDING")
        lab.start_node("node1")
        assert lab.wait_job(job, "RUNNING")["Restarts"] == "1"
        lab.check("scancel", job)
        lab.wait_idle()


@pytest.mark.slow
def test_a_job_lives_on_without_slurmd_and_without_the_controller(tmp_path: Path) -> None:
    with slurm(tmp_path / "lab", nodes=1, slurmd_timeout=100) as lab:
        job = submit(lab, f"until [ -e {lab.folder}/go ]; do sleep 0.2; done; echo done")
        lab.wait_job(job, "RUNNING")
        lab.wait_saved(job)
        wait_for(lambda: len(processes.of_node(lab.folder, "node1")) >= 4)
        lab.kill_slurmd("node1")
        lab.stop_controller()
        assert lab.run("squeue").returncode != 0
        assert len(processes.of_node(lab.folder, "node1")) >= 2
        lab.start_controller()
        lab.start_node("node1")
        assert lab.job(job)["JobState"] == "RUNNING"
        (lab.folder / "go").touch()
        assert lab.wait_job(job, "COMPLETED")["Restarts"] == "0"
        assert (lab.folder / f"{job}.out").read_text() == "done\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_lab_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    script = """
        sbatch --wrap 'sleep 1000'
        until squeue --noheader --states=running | grep .; do sleep 0.2; done
        echo $LAB_FOLDER
        sleep 1000
    """
    command = [*LAB, "--nodes", "1", "--", "bash", "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    # in a process group of its own, to which a terminal sends SIGINT
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **options) as lab:
        try:
            assert lab.stdout is not None
            folder = next(Path(line.strip()) for line in lab.stdout if line.startswith("/"))
            # slurmd, slurmstepd, the script and sleep; the controller calls a job running before they have started
            wait_for(lambda: len(processes.of_node(folder, "node1")) >= 4)
            if number == signal.SIGINT:
                os.killpg(lab.pid, number)
            else:
                lab.send_signal(number)
            assert lab.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
        finally:
            lab.kill()  # its guard takes the rest down; leaving this block waits for it
    if number == signal.SIGKILL:
        wait_for(lambda: not processes.of_lab(folder), timeout=20)
    else:
        assert not processes.of_lab(folder) and not folder.exists()


def test_a_command_that_is_killed_leaves_the_same_code_as_in_a_shell() -> None:
    result = subprocess.run([*LAB, "--nodes", "1", "--", "bash", "-c", "kill $$"], cwd=ROOT, timeout=60, check=False)
    assert result.returncode == 128 + signal.SIGTERM


def test_options_reach_the_configuration(tmp_path: Path) -> None:
    options = {"kill_wait": 30, "slurmd_timeout": 100, "preempt_send_user_signal": True, "enforce_part_limits": "ALL"}
    with slurm(tmp_path / "lab", nodes=1, max_time="5", preempt_mode="CANCEL", grace_time=0, **options) as lab:
        config = lab.check("scontrol", "show", "config")
        for line in ("KillWait = 30 sec", "SlurmdTimeout = 100 sec", "EnforcePartLimits = ALL"):
            assert line in " ".join(config.split()), line
        assert "preempt_send_user_signal" in config
        assert "PreemptMode=CANCEL" in lab.check("scontrol", "show", "partition", "low")
        assert lab.run("sbatch", "--time=10", "--wrap", "true").returncode == 1
