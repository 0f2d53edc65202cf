"""The kernels of a run are compared and timed in its own layer, here on the CPU."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from common.settings import Experiment
from tests.training.helpers import make_run, settings_of
from training import operations
from training.kernels import library
from training.planning.run import make_plan


def experiment_of(folder: Path, parallel: dict[str, Any] | None = None, **train: Any) -> Experiment:
    return make_plan(settings_of(make_run(folder, parallel=parallel or {}, train=train)), "tiny").experiment


def test_every_kernel_is_compared_and_timed(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = experiment_of(tmp_path, recompute="full")
    with library.using(()):
        found = operations.measure_kernels(experiment, device, time.monotonic() + 600)
        assert tuple(reason.split()[0] for reason in found.reasons) == library.KERNELS
        assert all("ms without it" in reason for reason in found.reasons)
        monkeypatch.setattr(library, "call", lambda *arguments: None)  # outputs stay full of NaN
        found = operations.measure_kernels(experiment, device, time.monotonic() + 600)
    assert found.kernels == [] and all("differs from PyTorch's" in reason for reason in found.reasons)


def test_a_part_is_timed_with_its_kernels_on_the_shards_of_a_rank(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns: dict[str, int] = {}
    call = library.call
    monkeypatch.setattr(
        library, "call", lambda name, *rest: (columns.setdefault(name, rest[1].shape[-1]), call(name, *rest))[1]
    )
    parallel = {"tensor": 2, "sequence_parallel": True, "data": 2, "zero_stage": 1}
    experiment = experiment_of(tmp_path, parallel, compile="none")
    for part in ("block", "loss", "optimizer"):
        assert operations.time_part(part, (), experiment, device) > 0
    assert not columns
    for part in ("block", "optimizer"):
        assert operations.time_part(part, library.KERNELS, experiment, device) > 0
    assert columns["add_dropout_norm"] == 32 and columns["bias_gelu"] == 4 * 32 // 2
    assert {"bias_gelu_backward", "add_dropout_norm_backward", "sum_of_squares", "adamw"} < columns.keys()
    model = operations.one_layer(experiment, device).model
    held = sum(parameter.numel() for module in (model, model.h) for parameter in module.parameters())  # two layers
    sizes = operations.rank_shapes(experiment, device).parameters()
    assert sum(sizes) == pytest.approx(held / 2, abs=len(sizes))
