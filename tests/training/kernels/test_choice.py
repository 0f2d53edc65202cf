"""Kernels are used where they were measured to win; each agrees with PyTorch on the shapes of a run."""

from dataclasses import replace
from typing import Any

import orjson
import pytest
import torch

from common.errors import KernelError
from training.kernels import choice, library
from training.kernels.cases import Case, Shapes, cases, runner, verify
from training.kernels.choice import KERNELS, Row, Table, choose, measure

SMALL = Shapes(
    samples=2,
    seq_len=24,
    n_layer=2,
    n_embd=32,
    n_head=2,
    vocabulary=90,
    padded_vocabulary=96,
    dropout=0.1,
    dtype="float32",
)


def table(*times: tuple[float, float, float | None]) -> Table:
    rows: list[Row] = [
        {"kernel": name, "ours": ours, "eager": eager, "compile": compiled, "bytes": 1}
        for name, (ours, eager, compiled) in zip(KERNELS, times, strict=False)
    ]
    return {"device": "a GPU", "torch": "2.13", "shapes": {}, "rows": rows}


def test_auto_takes_what_beats_both_others() -> None:
    first, second, third = KERNELS[0], KERNELS[1], (*KERNELS, "-")[2]
    assert choose(table((1, 2, 3), (2, 3, 1)), "auto")["kernels"] == [first]
    assert choose(table((2, 1, 3), (1, 2, None)), "auto")["kernels"] == [second]
    assert choose(table((1, 1, 2), (1, 2, 1)), "auto")["kernels"] == []  # as fast as is not faster
    found = choose(table((1, 2, 3), (2, 3, 1)), "auto")["reasons"]
    assert found[first] == "1.000 ms; PyTorch 2.000 ms, compiled 3.000 ms"
    assert found.get(third, "not measured") == "not measured"


def test_without_a_table_auto_takes_none() -> None:
    found = choose(None, "auto")
    assert found["kernels"] == [] and set(found["reasons"].values()) == {"auto, and nothing was measured"}


def test_on_takes_all_and_off_none_whatever_was_measured() -> None:
    slow = table((2, 1, 1), (2, 1, 1))
    assert choose(slow, "on")["kernels"] == list(KERNELS)
    assert choose(table((1, 2, 3)), "off")["kernels"] == []


def test_nothing_is_chosen_where_nothing_can_run() -> None:
    found = choose(table((1, 2, 3)), "on", missing="no CUDA device")
    assert found["kernels"] == [] and found["reasons"][KERNELS[0]] == "no CUDA device"


def test_a_choice_is_json() -> None:
    found = choose(table((1, 2, None), (2, 1, 1)), "auto")
    assert orjson.loads(orjson.dumps(found)) == found


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_kernel_has_a_case_in_which_it_agrees_with_pytorch(dtype: str, device: torch.device) -> None:
    found = {case.kernel: verify(case) for case in cases(replace(SMALL, dtype=dtype), device)}
    assert found == dict.fromkeys(KERNELS, "")


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.filterwarnings("ignore")  # the compiler looks at everything, deprecated things too
def test_every_op_is_compiled_whole_selected_or_not(ours: bool, device: torch.device) -> None:
    for case in cases(SMALL, device):
        if case.peer is None:
            torch.compiler.reset()
            with library.using([case.kernel] if ours else ()):
                compiled = torch.compile(case.forward, backend="aot_eager", fullgraph=True)
                found, expected = runner(case, compiled)(), runner(case, case.forward)()
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)


def test_a_wrong_kernel_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "call", lambda *arguments: None)  # its outputs stay full of NaN
    for case in cases(SMALL, device):
        assert "differs from PyTorch's by" in verify(case), case.kernel


def test_a_kernel_that_cannot_run_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_devices", frozenset())
    with pytest.raises(KernelError, match="no kernels are loaded for cpu"):
        verify(next(cases(SMALL, torch.device("cpu"))))


def test_a_measurement_times_each_kernel_alone_and_its_peers_without(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    calls: list[str] = []
    real = library.call
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(options) or function)
    monkeypatch.setattr(library, "call", lambda name, *arguments: (calls.append(name), real(name, *arguments)))
    monkeypatch.setattr(choice, "_REPEATS", 2)
    library.select(["something"])
    found = measure(SMALL, device)
    assert [row["kernel"] for row in found["rows"]] == list(KERNELS)
    assert all(row["ours"] > 0 and row["eager"] > 0 and row["bytes"] > 0 for row in found["rows"])
    assert library.selected("something", torch.zeros(1, device=device))
    assert found["shapes"]["n_embd"] == 32 and orjson.dumps(found)
    for case, row in zip(cases(SMALL, device), found["rows"], strict=True):
        assert (row["compile"] is None) == (case.peer is not None)
    assert len(compiled) == sum(row["compile"] is not None for row in found["rows"])
    assert set(calls) == launchers(device)
    assert len(calls) % (3 + 2) == 0  # 3 to warm up, 2 timed: only where its own kernel is selected


def launchers(device: torch.device) -> set[str]:
    """Every launcher that the cases call."""
    names: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "call", lambda name, *arguments: names.add(name))
        for case in cases(SMALL, device):
            _run(case)
    return names


def _run(case: Case) -> None:
    with library.using([case.kernel]):
        outputs = case.forward(*(inputs := case.make()))
        leaves = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
        if leaves:
            torch.autograd.grad(outputs, leaves, [torch.zeros_like(output) for output in outputs])
