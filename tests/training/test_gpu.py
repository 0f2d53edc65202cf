"""A run on a GPU in its main variants: learns as on a CPU, resumes, is sharded, read on a CPU.

`python -m benchmarks.gpu` checks every combination.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.files import read_rows
from tests.training.helpers import Patch, make_run, train_tiny
from training import checkpoint, operations
from training.kernels import library

# the compiler looks at everything, deprecated things too
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
MODEL = {"n_layer": 2, "n_head": 2, "n_embd": 128, "seq_len": 64, "dropout": 0.0}
NEAR = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product runs, in whatever test


def undo_choices() -> None:
    """A run chooses its operations for the whole process."""
    torch.use_deterministic_algorithms(False)
    operations.use_attention(*operations.ATTENTION)
    library.select(())
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def undo_choices_at_the_end() -> Iterator[None]:
    yield
    undo_choices()


def losses(folder: Path, **train: Any) -> list[float]:
    """Of 20 iterations."""
    settings = {"iterations": 20, "save_interval": 10, "lr": 3e-3, "async_save": True, **train}
    assert train_tiny(make_run(folder, model=MODEL, train=settings)) == 0
    return [float(row["lm_loss"]) for row in read_rows(folder / "models/tiny/train.csv")]


WAYS: list[dict[str, Any]] = [{"compile": "none"}, {"compile": "blocks"}, {"kernels": "on"}, {"recompute": "full"}]
RECIPES: list[dict[str, Any]] = [{"optimizer": "muon"}, {"reset_attention_mask": True}]


@pytest.mark.parametrize("precision", NEAR)
@pytest.mark.parametrize(("way", "recipe"), [*((way, {}) for way in WAYS), *(({}, recipe) for recipe in RECIPES)])
def test_a_gpu_learns_what_a_cpu_learns(
    tmp_path: Path, precision: str, way: dict[str, Any], recipe: dict[str, Any], monkeypatch: Patch
) -> None:
    if "kernels" in way and (missing := library.prepare(report=False)):
        pytest.skip(missing)
    found = losses(tmp_path / "gpu", precision=precision, initial_loss_scale=2.0**12, **way, **recipe)
    undo_choices()  # else the CPU would have to use the GPU's attention
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected = losses(tmp_path / "cpu", precision="float32", compile="none", **recipe)
    assert expected[-1] < expected[0] - 1
    near = NEAR["bfloat16"] if "optimizer" in recipe else NEAR[precision]  # Muon's products are in bfloat16 on GPUs
    assert found == pytest.approx(expected, rel=near)


@pytest.mark.parametrize("compiled", ["none", "blocks"])
def test_a_deterministic_run_continues_bit_for_bit(tmp_path: Path, compiled: str) -> None:
    settings = {"precision": "bfloat16", "compile": compiled, "deterministic": True}
    straight, folder = losses(tmp_path, **settings), tmp_path / "models/tiny"
    expected = checkpoint.load_weights(checkpoint.resolve(folder))
    (folder / "iter_0000020").rename(tmp_path / "aside")
    assert losses(tmp_path, **settings) == straight
    found = checkpoint.load_weights(checkpoint.resolve(folder))
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
