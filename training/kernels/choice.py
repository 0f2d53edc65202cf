"""Which kernels a run uses: measured beside PyTorch and its compiler, and kept as plain data.

    table = measure(Shapes(samples=8), torch.device("cuda"))
    choice = choose(table, "auto")      # {"mode": "auto", "kernels": […], "reasons": {…}, "table": …}
    library.select(choice["kernels"])

A kernel has to earn its place: under `auto` one that torch.compile beats is not used. Without a table `auto` uses none,
and that is the rule until docs/kernels.md has the table of a GPU.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from training.kernels import library
from training.kernels.cases import Case, Shapes, cases, runner

Mode = Literal["auto", "on", "off"]

KERNELS = (
    "cross_entropy", "causal_softmax", "add_dropout", "add_dropout_norm", "bias_gelu", "sum_of_squares", "adamw"
)  # fmt: skip
"""Every kernel, by the name that its op asks for."""

_WARM_UP, _REPEATS = 3, 20


class Row(TypedDict):
    """The times of one kernel, forward and backward, in milliseconds."""

    kernel: str
    ours: float
    eager: float
    compile: float | None
    """None: not compiled."""
    bytes: int
    """What must be read and written at least."""


class Table(TypedDict):
    """The result of `measure`."""

    device: str
    torch: str
    shapes: dict[str, Any]
    rows: list[Row]


class Choice(TypedDict):
    """What a run uses; stored in the model folder, so that a resumed run uses the same."""

    mode: Mode
    kernels: list[str]
    reasons: dict[str, str]
    """For each kernel, why it is used or not."""
    table: Table | None


def measure(shapes: Shapes, device: torch.device, *, compiled: bool = True) -> Table:
    """Time each kernel, PyTorch and torch.compile on the shapes of a run. Raises KernelError if a kernel fails.

    Takes about a minute, nearly all of it torch.compile's. `compiled=False` leaves that column out.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    rows = [_time(case, device, compiled) for case in cases(shapes, device)]
    return {"device": name, "torch": torch.__version__, "shapes": asdict(shapes), "rows": rows}


def choose(table: Table | None, mode: Mode, missing: str = "") -> Choice:
    """Which kernels to use. `missing`: why none can be, if that is so (`library.prepare`)."""
    if missing:
        reasons = dict.fromkeys(KERNELS, missing)
        kernels: list[str] = []
    elif mode == "off":
        reasons, kernels = dict.fromkeys(KERNELS, "off"), []
    elif mode == "on":
        reasons, kernels = dict.fromkeys(KERNELS, "on"), list(KERNELS)
    elif table is None:
        reasons, kernels = dict.fromkeys(KERNELS, "auto, and nothing was measured"), []
    else:
        found = {row["kernel"]: row for row in table["rows"]}
        kernels = [name for name in KERNELS if name in found and _wins(found[name])]
        reasons = {name: _reason(found[name]) if name in found else "not measured" for name in KERNELS}
    return {"mode": mode, "kernels": kernels, "reasons": reasons, "table": table}


def _wins(row: Row) -> bool:
    return row["ours"] < row["eager"] and (row["compile"] is None or row["ours"] < row["compile"])


def _reason(row: Row) -> str:
    compiled = "" if row["compile"] is None else f", compiled {row['compile']:.3f} ms"
    return f"{row['ours']:.3f} ms; PyTorch {row['eager']:.3f} ms{compiled}"


def _time(case: Case, device: torch.device, compiled: bool) -> Row:
    with library.using([case.kernel]):
        ours = _milliseconds(runner(case, case.forward), device)
    with library.using(()):
        eager = _milliseconds(runner(case, case.forward), device)
        if case.plain is not None:
            eager = min(eager, _milliseconds(runner(case, case.plain), device))
        if case.peer is not None:
            inputs, peer = case.make(), case.peer
            eager = min(eager, _milliseconds(lambda: peer(*inputs), device))
        best = None
        if compiled and case.peer is None:
            forward: Callable[..., tuple[Tensor, ...]] = torch.compile(case.plain or case.forward, dynamic=False)
            best = _milliseconds(runner(case, forward), device)
    return {"kernel": case.kernel, "ours": ours, "eager": eager, "compile": best, "bytes": case.bytes}


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of some runs, after others to warm up."""
    for _ in range(_WARM_UP):
        run()
    if device.type != "cuda":
        return median(_timed(run) for _ in range(_REPEATS))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize(device)
    return float(median(before.elapsed_time(after) for before, after in pairwise(events)))


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return (time.perf_counter() - begun) * 1000
