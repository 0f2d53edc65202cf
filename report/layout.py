"""A training's layout, predicted memory and speed beside what it used."""

from collections.abc import Sequence

import numpy as np

from common.console import readable_bytes
from common.page import duration, number
from report.drawing import Bar
from report.models import Model

GIB = 2**30


def comparisons(model: Model) -> list[tuple[str, str, str]]:
    """(name, planned, used) of layout, memory per process, speed, time and starts, where both are known."""
    plan, experiment, peak = model.plan or {}, model.experiment, _peak(model)
    source = (model.merged or {}).get("source", {}).get("layout", "")
    planned = {key: plan[key] for key in ("memory_bytes", "tokens_per_second", "seconds") if plan.get(key)}
    memory = f"{planned['memory_bytes'] / GIB:.2f} GiB" if "memory_bytes" in planned else ""
    speed = number(float(planned["tokens_per_second"])) if "tokens_per_second" in planned else ""
    middle = _median_speed(model)
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


def facts(model: Model) -> str:
    """`16 samples of 128 tokens per iteration; 3,879 tokens per second in the median; 5 min`: plan or no plan."""
    found, train = list[str](), model.experiment.train if model.experiment else None
    if model.experiment and train:
        found.append(f"{train.global_batch_size:,} samples of {model.experiment.model.seq_len:,} tokens per iteration")
    if middle := _median_speed(model):
        found.append(f"{number(middle)} tokens per second in the median")
    if model.seconds:
        found.append(f"{duration(model.seconds)} of iterations")
    return "; ".join(found)


def _median_speed(model: Model) -> float:
    seen = model.train.values("tokens_per_second")
    return float(np.nanmedian(seen)) if np.isfinite(seen).any() else 0.0


def _peak(model: Model) -> float:
    """Bytes of the process that used most."""
    used = model.train.values("memory_mb")
    return float(np.nanmax(used)) * 1e6 if np.isfinite(used).any() else 0.0


def memory_chart(models: Sequence[Model]) -> list[Bar]:
    """Per model, the predicted memory by part and what was used; none for a model without a prediction.

    Without what a process takes before it holds a model (Python, the CUDA context): most of a small bar.
    """
    bars = []
    for model in models:
        parts = dict((model.plan or {}).get("memory") or {})
        if not parts:
            continue
        context, used = parts.pop("context", 0), _peak(model)
        if (model.card or {}).get("device") == "CPU":  # on a GPU, what is used does not count it
            used = max(0, used - context)
        predicted = f"{model.name}: {readable_bytes(sum(parts.values()))} per process predicted"
        around = f", beside {readable_bytes(context)} of the process itself" if context else ""
        bars.append(Bar(predicted + around, [(f"{part} {readable_bytes(held)}", held) for part, held in parts.items()]))
        text = f"{readable_bytes(used)} used at most"
        bars.append(Bar(f"{model.name}: {text}", [(text, used)]))
    return bars
