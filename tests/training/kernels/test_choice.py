"""Kernels are used where they were measured to win; each agrees with PyTorch on the shapes of a run."""

from dataclasses import replace

import orjson
import pytest
import torch

from training.kernels import library
from training.kernels.cases import Shapes, cases, verify
from training.kernels.choice import KERNELS, Row, Table, choose

MODEL = {"seq_len": 24, "n_layer": 2, "n_embd": 32, "n_head": 2, "vocabulary": 90, "padded_vocabulary": 96}
SMALL = Shapes(samples=2, dropout=0.1, dtype="float32", **MODEL)


def table(*times: tuple[float, float, float | None]) -> Table:
    rows: list[Row] = [
        {"kernel": name, "ours": ours, "eager": eager, "compile": compiled, "bytes": 1}
        for name, (ours, eager, compiled) in zip(KERNELS, times, strict=False)
    ]
    return {"device": "a GPU", "torch": "2.13", "shapes": {}, "rows": rows}


def test_auto_takes_what_was_measured_to_beat_both_others() -> None:
    first, second, third = KERNELS[:3]
    found = choose(table((1, 2, 3), (2, 3, 1)), "auto")
    assert found["kernels"] == [first] and found["reasons"][third] == "not measured"
    assert all(time in found["reasons"][second] for time in ("2.000", "3.000", "1.000"))
    assert orjson.loads(orjson.dumps(found)) == found
    assert choose(table((2, 1, 3), (1, 2, None)), "auto")["kernels"] == [second]
    assert choose(table((1, 1, 2), (1, 2, 1)), "auto")["kernels"] == []  # as fast as is not faster
    assert choose(None, "auto")["kernels"] == []


def test_on_takes_all_and_off_none_whatever_was_measured_and_none_is_taken_where_none_runs() -> None:
    assert choose(table((2, 1, 1), (2, 1, 1)), "on")["kernels"] == list(KERNELS)
    assert choose(table((1, 2, 3)), "off")["kernels"] == []
    found = choose(table((1, 2, 3)), "on", missing="no CUDA device")
    assert found["kernels"] == [] and found["reasons"] == dict.fromkeys(KERNELS, "no CUDA device")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_kernel_has_a_case_in_which_it_agrees_with_pytorch(dtype: str, device: torch.device) -> None:
    found = {case.kernel: verify(case) for case in cases(replace(SMALL, dtype=dtype), device)}
    assert found == dict.fromkeys(KERNELS, "")


def test_a_wrong_kernel_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "call", lambda *arguments: None)  # its outputs stay full of NaN
    for case in cases(SMALL, device):
        assert verify(case) != "", case.kernel
