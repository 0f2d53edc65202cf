"""The throw-away cluster that the other tests stand on, and `make slurm-lab`."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.slurm.lab import missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")]
LAB = [sys.executable, "-m", "tests.slurm.lab"]


def test_the_command_line_returns_the_exit_code_and_hands_out_its_gpus() -> None:
    script = "srun --nodes 2 --gres gpu:1 printenv SLURMD_NODENAME CUDA_VISIBLE_DEVICES && ls /etc/slurm && exit 7"
    command = [*LAB, "--gpus", "2", "--", "bash", "-c", script]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 7, result.stderr
    assert sorted(result.stdout.split()) == ["0", "0", "gres.conf", "node1", "node2", "slurm.conf", "spool"]
