import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.slurm.lab import missing


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")
def test_the_benchmark_of_shards_on_slurm_prints_a_row_per_way() -> None:
    command = ["-m", "tests.slurm.lab", "--", sys.executable, "-m", "benchmarks.corpus", "workflow", "--shards", "2"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "plain array of 2 tasks" in done.stdout and "slurm-batch, array of 2 tasks" in done.stdout
