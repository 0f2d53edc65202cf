"""The same run on a GPU: every precision, compiled, saved in the background, resumed, read again on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.files import read_rows
from tests.training.helpers import make_run, run_main, settings_of
from training import checkpoint
from training.evaluation.scoring import sum_of_losses
from training.inference.load import model_from_weights
from training.plan import make_plan
from training.train import main

pytestmark = pytest.mark.gpu
MODEL = {"n_layer": 2, "n_head": 2, "n_embd": 128, "seq_len": 64, "dropout": 0.0}


def run(folder: Path, **train: Any) -> list[dict[str, str]]:
    """20 iterations; the rows of train.csv."""
    config = make_run(folder, model=MODEL, train={"iterations": 20, "save_interval": 10, "lr": 3e-3, **train})
    assert run_main(main, "--config", config, "--model", "tiny") == 0
    return read_rows(folder / "models/tiny/train.csv")


def losses(rows: list[dict[str, str]]) -> list[float]:
    return [float(row["lm_loss"]) for row in rows]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("precision", "near"), [("float32", 1e-3), ("bfloat16", 0.05), ("float16", 0.05)])
@pytest.mark.filterwarnings("ignore")  # the compiler looks at everything, deprecated things too
def test_a_gpu_learns_what_the_cpu_learns(
    tmp_path: Path, precision: str, near: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = losses(
        run(tmp_path / "gpu", precision=precision, compile=compiled, initial_loss_scale=2.0**12, async_save=True)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected = losses(run(tmp_path / "cpu", precision="float32", compile=False))
    assert expected[-1] < expected[0] - 1
    assert found == pytest.approx(expected, rel=near)


def test_a_checkpoint_of_a_gpu_is_read_on_a_cpu(tmp_path: Path) -> None:
    run(tmp_path, precision="float32", async_save=True)
    manifest = checkpoint.resolve(tmp_path / "models/tiny")
    model = model_from_weights(manifest.experiment.model, checkpoint.load_weights(manifest))
    plan = make_plan(settings_of(tmp_path / "config.yaml"), "tiny")
    count = min(plan.data.valid.per_epoch, 8)
    loss = sum_of_losses(model, plan.data.valid, count, 4) / (count * MODEL["seq_len"])
    assert loss == pytest.approx(float(read_rows(tmp_path / "models/tiny/valid.csv")[-1]["loss"]), rel=1e-3)


def test_a_resumed_run_continues_where_it_was(tmp_path: Path) -> None:
    straight = run(tmp_path, precision="bfloat16")
    last = tmp_path / "models/tiny/iter_0000020"
    last.rename(tmp_path / "aside")
    assert losses(run(tmp_path, precision="bfloat16")) == pytest.approx(losses(straight), rel=1e-2)
