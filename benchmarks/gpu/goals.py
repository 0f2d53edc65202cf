"""The goals of the GPU benchmark, and whether its rows reach them."""

from collections.abc import Mapping, Sequence

from benchmarks.gpu.items import Row
from training.planning.comparison import MEMORY_GOAL, TIME_GOAL

_MFU = {"345m": (50.0, "204k tokens/s on an H100 or H200; best published 46.2 %"), "124m": (40.5, "llm.c's")}
_BANDWIDTH = 85.0  # per cent of a copy's, of kernels that only move bytes
_CHUNKED = 1.2  # times the time of the fastest whole loss, at a quarter of its memory


def goals(rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """A line per goal on which there are rows."""
    steps = [row for row in rows.get("step", ()) if row["step"] == "ours"]
    kernels = rows.get("kernels", ())
    return [
        *_mfu(steps),
        *_kernels_auto(steps),
        *_bandwidth(kernels),
        *_loss(kernels),
        *_planning(rows.get("planning", ())),
    ]


def _line(goal: str, found: str, reached: bool) -> str:
    return f"{goal}: {found}, {'reached' if reached else 'NOT reached'}"


def _mfu(steps: Sequence[Row]) -> list[str]:
    lines = []
    for size, (least, remark) in _MFU.items():
        found = [row for row in steps if row["size"] == size and not row["dropout"] and row["MFU %"] is not None]
        if found:
            best = max(found, key=lambda row: float(row["MFU %"]))
            text = f"{best['MFU %']:.1f} % at micro-batch {best['micro']} {best['variant']}".rstrip()
            lines.append(_line(f"{size} at dropout 0: {least} % MFU or more ({remark})", text, best["MFU %"] >= least))
    return lines


def _kernels_auto(steps: Sequence[Row]) -> list[str]:
    """Rows with kernels off, beside the row that differs in nothing else."""
    lines = []
    for off in steps:
        if off["variant"] != "kernels off":
            continue
        keys = ("size", "micro", "dropout")
        for auto in steps:
            if auto["variant"] == "" and all(auto[key] == off[key] for key in keys):
                gain = auto["tokens/s"] / off["tokens/s"]
                # 1 %: two runs of the same step differ by as much
                lines.append(
                    _line("kernels auto not slower than off", f"{gain:.3f} of its tokens per second", gain > 0.99)
                )
    return lines


def _bandwidth(kernels: Sequence[Row]) -> list[str]:
    shares = {str(row["kernel"]): row.get("of a copy %") for row in kernels if "kernel" in row}
    found = {name: float(share) for name, share in shares.items() if share is not None}
    if not found:
        return []
    slowest = min(found, key=lambda name: found[name])
    goal = f"kernels at {_BANDWIDTH:g} % or more of a copy's bandwidth"
    return [_line(goal, f"the least is {slowest} with {found[slowest]:.0f} %", found[slowest] >= _BANDWIDTH)]


def _loss(kernels: Sequence[Row]) -> list[str]:
    forms = {str(row["loss"]): row for row in kernels if "loss" in row}
    whole = [row for name, row in forms.items() if name.startswith("whole") and row["peak GB"] is not None]
    chunked = forms.get("chunked")
    if not whole or chunked is None or chunked["peak GB"] is None:
        return []
    fastest = min(whole, key=lambda row: float(row["ms"]))
    time, memory = chunked["ms"] / fastest["ms"], chunked["peak GB"] / fastest["peak GB"]
    goal = "loss in parts: 1.2 times the time of the fastest whole one or less, a quarter of its memory or less"
    return [_line(goal, f"{time:.2f} times the time, {memory:.2f} of the memory", time <= _CHUNKED and memory <= 0.25)]


def _planning(rows: Sequence[Row]) -> list[str]:
    lines = []
    for key, goal in {"memory error %": MEMORY_GOAL, "time error %": TIME_GOAL}.items():
        found = [row for row in rows if row["device"] == "cuda"]
        if found:
            worst = max(found, key=lambda row: abs(float(row[key])))
            what = f"{worst['size']}, micro-batch {worst['micro']}, recompute {worst['recompute']}"
            name = key.removesuffix(" error %")
            text = f"the worst of {len(found)} is {worst[key]:+.1f} % at {what}"
            lines.append(_line(f"predicted {name} within {goal:g} %", text, abs(worst[key]) <= goal))
    return lines
