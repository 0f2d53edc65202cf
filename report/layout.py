"""The layout of a training and its predicted memory and speed, beside what it used."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from common.page import COLORS, WIDTH, as_svg, duration, figure_style, number
from report.models import Model

GIB = 2**30


@dataclass(frozen=True)
class Comparison:
    """One line: what was planned, and what came."""

    name: str
    planned: str
    used: str


def comparisons(model: Model) -> list[Comparison]:
    """Layout, batch, memory per process, speed and time of a model; a figure that is not known is empty."""
    plan, train = model.plan or {}, model.train
    source = (model.merged or {}).get("source", {}).get("layout", "")
    rows = [Comparison("layout", plan.get("layout") or _layout(model), source)]
    if model.experiment:
        batch, length = model.experiment.train.global_batch_size, model.experiment.model.seq_len
        rows.append(Comparison("batch", f"{batch:,} samples of {length:,} tokens", ""))
    if plan.get("memory_bytes") or _peak(model):
        predicted = f"{plan['memory_bytes'] / GIB:.2f} GiB" if plan.get("memory_bytes") else ""
        used = f"{_peak(model) / GIB:.2f} GiB at most" if _peak(model) else ""
        rows.append(Comparison("memory per process", predicted, used))
    speed = train.values("tokens_per_second")
    middle = float(np.nanmedian(speed)) if np.isfinite(speed).any() else 0.0
    if plan.get("tokens_per_second") or middle:
        predicted = f"{number(float(plan['tokens_per_second']))}" if plan.get("tokens_per_second") else ""
        rows.append(Comparison("tokens per second", predicted, f"{number(middle)} in the median" if middle else ""))
    if plan.get("seconds") or model.seconds:
        predicted = duration(plan["seconds"]) if plan.get("seconds") else ""
        rows.append(Comparison("time of the iterations", predicted, duration(model.seconds) if model.seconds else ""))
    if len(model.starts) > 1:
        rows.append(Comparison("starts", "1", str(len(model.starts))))
    return [row for row in rows if row.planned or row.used]


def _layout(model: Model) -> str:
    return model.experiment.parallel.factors if model.experiment else ""


def _peak(model: Model) -> float:
    """Bytes of the process that used most."""
    used = model.train.values("memory_mb")
    return float(np.nanmax(used)) * 1e6 if np.isfinite(used).any() else 0.0


def memory_chart(models: Sequence[Model]) -> Markup | None:
    """Per model, the predicted memory by part over what was used; None if no model has both."""
    known = [model for model in models if model.plan and model.plan.get("memory")]
    if not known:
        return None
    parts = list(dict.fromkeys(part for model in known for part in (model.plan or {})["memory"]))
    titles: dict[str, str] = {}
    with figure_style("predicted-memory"):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(WIDTH, 1.2 + 0.75 * len(known)), layout="constrained")
        for row, model in enumerate(known):
            left = 0.0
            predicted: dict[str, float] = (model.plan or {})["memory"]
            for place, part in enumerate(parts):
                held = predicted.get(part, 0.0) / GIB
                label = part if row == 0 else None
                color = COLORS[place % len(COLORS)]
                (bar,) = axes.barh(row - 0.12, held, left=left, height=0.3, color=color, label=label)
                bar.set_gid(f"part-{row}-{place}")
                titles[f"part-{row}-{place}"] = f"{model.name}: {part} {held:.3g} GiB predicted"
                left += held
            used = _peak(model) / GIB
            (bar,) = axes.barh(row + 0.2, used, height=0.22, color="none", edgecolor=COLORS[4], linewidth=1.5)
            bar.set_gid(f"used-{row}")
            titles[f"used-{row}"] = f"{model.name}: {used:.3g} GiB used at most"
            note = f"{model.name}: predicted {left:.2f} GiB, used {used:.2f}"
            axes.text(0, row - 0.31, note, fontsize=9, va="bottom")
        axes.set_ylim(len(known) - 0.5, -0.6)
        axes.set_yticks([])
        axes.tick_params(labelsize=9)
        axes.set_xlabel("GiB per process", fontsize=9)
        axes.grid(axis="x")
        figure.legend(loc="outside lower center", ncols=3, fontsize=9)
        return as_svg(figure, "Predicted memory by part, and the memory that was used", titles)
