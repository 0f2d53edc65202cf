"""Predicted and measured memory and speed of a training's layout."""

from collections.abc import Sequence

import numpy as np

from common.console import readable_bytes
from common.page import duration, number
from workflow.report.drawing import Bar
from workflow.report.models import Model

GIB = 2**30


def comparisons(model: Model) -> list[tuple[str, str, str]]:
    """(name, planned, used) of layout, memory per process, speed, time and starts, if both are known."""
    plan, experiment, peak = model.plan or {}, model.experiment, _peak(model)
    source = (model.merged or {}).get("source", {}).get("layout", "")
    planned = {key: plan[key] for key in ("memory_bytes", "tokens_per_second", "seconds") if plan.get(key)}
    memory = f"{planned['memory_bytes'] / GIB:.2f} GiB" if "memory_bytes" in planned else ""
    speed = number(float(planned["tokens_per_second"])) if "tokens_per_second" in planned else ""
    seen = model.train.values("tokens_per_second")
    middle = float(np.nanmedian(seen)) if np.isfinite(seen).any() else 0.0
    mfu = model.train.values("mfu")
    share = f", {np.nanmedian(mfu):.1%} of the device's peak" if np.isfinite(mfu).any() else ""
    time = duration(planned["seconds"]) if "seconds" in planned else ""
    rows = [
        ("layout", plan.get("layout") or (experiment.parallel.factors if experiment else ""), source),
        ("memory per process", memory, f"{peak / GIB:.2f} GiB at most" if peak else ""),
        ("tokens per second", speed, f"{number(middle)} in the median{share}" if middle else ""),
        ("time of the iterations", time, duration(model.seconds) if model.seconds else ""),
        *([("starts", "1", str(len(model.starts)))] if len(model.starts) > 1 else []),
    ]
    return [row for row in rows if all(row[1:])]


def _peak(model: Model) -> float:
    """Peak memory over all processes, in bytes."""
    used = model.train.values("memory_mb")
    return float(np.nanmax(used)) * 1e6 if np.isfinite(used).any() else 0.0


def memory_chart(models: Sequence[Model]) -> list[Bar]:
    """Predicted memory by part and measured memory of each model, both without the process's context."""
    bars = []
    for model in models:
        if parts := dict((model.plan or {}).get("memory") or {}):
            context = parts.pop("context", 0)
            counted = context if (model.card or {}).get("device") == "CPU" else 0  # in what is used
            used = f"{readable_bytes(max(0, _peak(model) - counted))} used at most"
            named = [(f"{part} {readable_bytes(held)}", held) for part, held in parts.items()]
            predicted = f"{readable_bytes(sum(parts.values()))} per process predicted"
            bars.append(Bar(f"{model.name}: {predicted}, and {readable_bytes(context)} for the process itself", named))
            bars.append(Bar(f"{model.name}: {used}", [(used, max(0, _peak(model) - counted))]))
    return bars
