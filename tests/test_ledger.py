"""What a compiled step would move on a GPU stays as little as docs/kernels.md says, by the code
generated for one.
"""

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the pretended GPU")


def moved(**options: object) -> dict[str, Any]:
    values = {"size": "345m", "micro_batch": 16, "tensor": 1, **options}
    code = f"import json; from benchmarks.ledger import ledger; print(json.dumps(ledger(**{values})))"
    found: dict[str, Any] = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    return found


@pytest.mark.slow  # Inductor's code is that of one version of PyTorch
@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({"dropout": 0, "kernels": True}, {"block": 1.55, "loss": 3.5, "step": 42, "kept": 13.3}),
        ({"dropout": 0.1, "kernels": True}, {"block": 1.70, "loss": 3.5, "step": 46, "kept": 13.8}),
        ({"dropout": 0, "kernels": False}, {"block": 1.92, "loss": 3.5, "step": 50.5, "kept": 13.3}),
        ({"dropout": 0.1, "kernels": True, "tensor": 2}, {"block": 1.32, "loss": 2.7, "step": 35, "kept": 9.1}),
    ],
)
def test_bytes_of_345m_at_micro_batch_16(options: dict[str, object], largest: dict[str, float]) -> None:
    found = moved(**options)
    assert not found["kept_float32_vocabulary"]
    for name, limit in largest.items():
        assert 0.9 * limit < found[name] <= limit, (name, found)
    if "tensor" not in options:
        slowest, fastest = found["H100 MFU %"]
        assert 40 < slowest < fastest < 60


def test_heads_that_cannot_be_split_are_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.training", "bytes", "--size", "1.5b", "--tensor", "2"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "parallel.tensor" in refused.stderr
