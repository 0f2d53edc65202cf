"""Where the time of the best step goes: the 15 kernels that take most of it.

Three steps under torch.profiler. Shares are of the time that all kernels take; `idle` is the part of the same steps,
timed without the profiler, in which no kernel ran.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from benchmarks.gpu.clock import seconds
from benchmarks.gpu.items import Context, Item, Row
from benchmarks.gpu.steps import VARIANTS, Variant, running

TITLE = "Profile of the best step"

_STEPS, _TOP, _LENGTH = 3, 15, 90


def items(_toy: bool) -> list[Item]:
    """One item for the whole table."""
    return [Item("profile", "best step of 345m", 40)]


def best(rows: list[Row]) -> Variant:
    """The fastest of our steps at 345M and dropout 0; the first variant if there is none."""
    ours = [row for row in rows if (row["step"], row["size"], row["dropout"]) == ("ours", "345m", 0)]
    fastest = max(ours, key=lambda row: float(row["tokens/s"]), default=None)
    for variant in VARIANTS.values():
        key = (variant.size, variant.micro, variant.step, variant.dropout, variant.text)
        if fastest is None or key == tuple(fastest[name] for name in ("size", "micro", "step", "dropout", "variant")):
            return variant
    raise AssertionError(fastest)


def run(_item: Item, context: Context) -> Iterator[Row]:
    """A row per kernel, then the rest, and the idle time."""
    import torch
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    device = torch.device("cuda" if context.gpu else "cpu")
    kind = DeviceType.CUDA if context.gpu else DeviceType.CPU
    variant = best(list(context.rows.get("step", ())))
    with running(variant, context) as (steps, _):
        list(islice(steps, 3))
        wall = seconds(lambda: list(islice(steps, _STEPS)), device) / _STEPS * 1000
        with profile(activities=[ProfilerActivity.CUDA if context.gpu else ProfilerActivity.CPU]) as profiler:
            list(islice(steps, _STEPS))
            if context.gpu:
                torch.cuda.synchronize()
        events: list[Any] = [
            event
            for event in profiler.key_averages()
            if event.device_type == kind and not getattr(event, "is_user_annotation", False)
        ]
    times = sorted(((_milliseconds(event, context.gpu), event.count, event.key) for event in events), reverse=True)
    total = sum(time for time, *_ in times)
    yield _row(f"all kernels of a step ({variant.name})", sum(count for _, count, _ in times), total, total)
    for time, count, name in times[:_TOP]:
        yield _row(name, count, time, total)
    rest = times[_TOP:]
    yield _row(f"{len(rest)} others", sum(count for _, count, _ in rest), sum(time for time, *_ in rest), total)
    yield {**_row("idle", 0, max(0.0, wall - total), total), "share %": None, "calls per step": None}


def _milliseconds(event: Any, gpu: bool) -> float:
    """Per step."""
    return float(event.self_device_time_total if gpu else event.self_cpu_time_total) / 1000 / _STEPS


def _row(name: str, count: int, milliseconds: float, total: float) -> Row:
    return {
        "kernel": name.replace("|", "/")[:_LENGTH],
        "calls per step": count / _STEPS,
        "ms per step": milliseconds,
        "share %": 100 * (milliseconds / total) if total else None,
    }
