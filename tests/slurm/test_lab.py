"""The throw-away cluster that the other tests stand on, and `make slurm-lab`."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.slurm.lab import SYSTEM_FOLDER, missing, processes, slurm
from tests.training.helpers import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")]
LAB = [sys.executable, "-m", "tests.slurm.lab"]


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
    with slurm(tmp_path / "a", nodes=1) as one, slurm(tmp_path / "b", nodes=3) as other:
        one.check("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk))
        script = f"head -c 100000 /dev/zero > {disk}/file"
        assert one.run("sbatch", "--wait", "--output=/dev/null", "--wrap", script).returncode == 1
        assert other.check("srun", "--nodes=3", "ls", str(disk)) == "" == "".join(os.listdir(disk))
    for lab in (one, other):
        assert not processes.of_lab(lab.folder)


@pytest.mark.skipif(bool(missing(accounting=True)), reason=missing(accounting=True) or "accounting is here")
def test_with_accounting_ended_jobs_are_known(tmp_path: Path) -> None:
    with slurm(tmp_path / "lab", nodes=1, accounting=True) as lab:
        assert lab.run("sbatch", "--wait", "--output=/dev/null", "--wrap", "exit 3").returncode == 3
        sacct = ["sacct", "--noheader", "--allocations", "--parsable2", "--format=Account,State,ExitCode"]
        lab.wait(lambda: lab.check(*sacct) == "lab|FAILED|3:0\n", log="slurmdbd.log")
        assert lab.run("sbatch", "--account=other", "--wrap", "true").returncode == 1


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
            (os.killpg if number == signal.SIGINT else os.kill)(lab.pid, number)
            assert lab.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
        finally:
            lab.kill()  # its guard takes the rest down; leaving this block waits for it
    wait_for(lambda: not processes.of_lab(folder), timeout=20)
    assert number == signal.SIGKILL or not folder.exists()
