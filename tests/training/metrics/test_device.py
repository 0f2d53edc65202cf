"""The memory of a rank is its own."""

import subprocess
import sys

from tests.conftest import ROOT


def test_the_peak_of_a_rank_on_a_cpu_does_not_begin_with_that_of_the_process_which_started_it() -> None:
    rank = "import torch; from training.metrics.device import memory; print(*memory(torch.device('cpu')).values())"
    starter = f"import os, sys; held = b'x' * 800_000_000; os.execv(sys.executable, [sys.executable, '-c', {rank!r}])"
    done = subprocess.run([sys.executable, "-c", starter], cwd=ROOT, capture_output=True, text=True, check=True)
    resident, peak = map(float, done.stdout.split())
    assert resident <= peak < 700  # MB; a rank that has only imported torch has about 300
