"""A training's layout, predicted memory and speed beside what it used."""

from collections.abc import Sequence

import numpy as np

from common.page import duration, number
from workflow.report.drawing import Bar
from workflow.report.models import Model

GIB = 2**30


def comparisons(model: Model) -> list[tuple[str, str, str]]:
    """(name, planned, used) of layout, batch, memory per process, speed and time; empty for what is not known."""
    plan, experiment, peak = model.plan or {}, model.experiment, _peak(model)
    source = (model.merged or {}).get("source", {}).get("layout", "")
    planned = {key: plan[key] for key in ("memory_bytes", "tokens_per_second", "seconds") if plan.get(key)}
    batch = experiment and f"{experiment.train.global_batch_size:,} samples of {experiment.model.seq_len:,} tokens"
    memory = f"{planned['memory_bytes'] / GIB:.2f} GiB" if "memory_bytes" in planned else ""
    speed = number(float(planned["tokens_per_second"])) if "tokens_per_second" in planned else ""
    seen = model.train.values("tokens_per_second")
    middle = float(np.nanmedian(seen)) if np.isfinite(seen).any() else 0.0
    mfu = model.train.values("mfu")
    share = f", {np.nanmedian(mfu):.1%} of the device's peak" if np.isfinite(mfu).any() else ""
    time = duration(planned["seconds"]) if "seconds" in planned else ""
    rows = [
        ("layout", plan.get("layout") or (experiment.parallel.factors if experiment else ""), source),
        ("batch", batch or "", ""),
        ("memory per process", memory, f"{peak / GIB:.2f} GiB at most" if peak else ""),
        ("tokens per second", speed, f"{number(middle)} in the median{share}" if middle else ""),
        ("time of the iterations", time, duration(model.seconds) if model.seconds else ""),
        *([("starts", "1", str(len(model.starts)))] if len(model.starts) > 1 else []),
    ]
    return [row for row in rows if any(row[1:])]


def _peak(model: Model) -> float:
    """Bytes of the process that used most."""
    used = model.train.values("memory_mb")
    return float(np.nanmax(used)) * 1e6 if np.isfinite(used).any() else 0.0


def memory_chart(models: Sequence[Model]) -> list[Bar]:
    """Per model, the predicted memory by part and what was used; none for a model without a prediction."""
    bars = []
    for model in models:
        if parts := {part: held / GIB for part, held in ((model.plan or {}).get("memory") or {}).items()}:
            predicted = f"{model.name}: {sum(parts.values()):.2f} GiB per process predicted"
            bars.append(Bar(predicted, [(f"{part} {held:.2g}", held) for part, held in parts.items()]))
            used = f"{_peak(model) / GIB:.2f} GiB used at most"
            bars.append(Bar(f"{model.name}: {used}", [(used, _peak(model) / GIB)]))
    return bars
