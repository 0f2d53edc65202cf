"""Training curves as SVG; layout, memory and speed, planned and used."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from common.console import readable_bytes
from common.page import COLORS, WIDTH, as_svg, duration, figure_style, number
from workflow.report.funnel import Bar
from workflow.report.models import Curve, Floats, Model

POINTS = 600  # of a curve: the smallest and the largest value of half as many buckets
HOVERS = 240  # values of a chart that a pointer can read, over all its curves
ROWS = 20  # of the table below the charts, for each model
PANELS = {
    "lm_loss": "Loss, in nats per token",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm before clipping",
    "tokens_per_second": "Tokens per second",
}
"""Captions of the drawn columns of train.csv. MFU has the same curve as tokens per second."""
_GIB = 2**30
_STYLES = ("-", "--", "-.", ":")  # models differ without colour, too


def thin(values: Floats, points: int = POINTS) -> NDArray[np.int64]:
    """Indices of at most `points` finite values: first, last, and the extremes of each bucket."""
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= points:
        return finite
    kept = {int(finite[0]), int(finite[-1])}
    for bucket in np.array_split(finite, (points - 2) // 2):
        kept |= {int(bucket[np.argmin(values[bucket])]), int(bucket[np.argmax(values[bucket])])}
    return np.array(sorted(kept))


def _tokens(model: Model, curve: Curve) -> Floats:
    """The tokens seen at each row of a curve; without samples (an older file), its iterations."""
    samples, tokens = model.train.values("consumed_samples"), model.train.values("consumed_tokens")
    if len(tokens) and len(samples) and len(curve.values("consumed_samples")):
        return curve.values("consumed_samples") * float(tokens[-1] / samples[-1])
    return curve.values("iteration")


def _restarts(model: Model) -> list[tuple[float, str]]:
    """(tokens, what happened) of each start from a checkpoint."""
    iterations = model.train.values("iteration")
    per_iteration = _tokens(model, model.train)[-1] / iterations[-1] if len(iterations) else 0.0
    restarts, before = [], ""
    for row in model.starts:
        iteration, processes = int(row["iteration"]), row["processes"]
        size = f" on {processes} processes" if processes != before else ""
        if iteration > 0:
            restarts.append((per_iteration * iteration, f"started again from iteration {iteration:,}{size}"))
        before = processes
    return restarts


def curve_charts(models: Sequence[Model], panels: Mapping[str, str] = PANELS) -> list[tuple[str, Markup]]:
    """(caption, drawing) of the panels that some model has."""
    known = {name: caption for name, caption in panels.items() if any(_has(model.train, name) for model in models)}
    return [(caption, _chart(name, caption, models)) for name, caption in known.items()]


def _has(curve: Curve, name: str) -> bool:
    return int(np.isfinite(curve.values(name)).sum()) > 1  # one point is no curve


def _chart(column: str, caption: str, models: Sequence[Model]) -> Markup:
    titles: dict[str, str | Sequence[str]] = {}
    hovers = max(8, HOVERS // (2 * len(models)))
    over = "tokens" if any(len(model.train.values("consumed_tokens")) for model in models) else "iterations"
    with figure_style(column):
        from matplotlib import pyplot, ticker

        figure, axes = pyplot.subplots(figsize=(WIDTH, 2.9), layout="constrained")
        for place, model in enumerate(models):
            color, style = COLORS[place % len(COLORS)], _STYLES[place // len(COLORS) % len(_STYLES)]
            curves = [("training" if column == "lm_loss" else "", model.train, column, style, color)]
            if column == "lm_loss":
                second = COLORS[(place + 1) % len(COLORS)] if len(models) == 1 else color
                curves.append(("validation", model.valid, "loss", "--", second))
            for kind, curve, name, line, shade in curves:
                label = " ".join(filter(None, (model.name if len(models) > 1 or not kind else "", kind)))
                x, y = _tokens(model, curve), curve.values(name)
                kept = thin(y)
                if not len(kept):
                    continue
                sparse = {"marker": "o", "markersize": 3} if len(kept) <= 40 else {}
                axes.plot(x[kept], y[kept], line, color=shade, linewidth=1.4, label=label, **sparse)
                gid = f"points-{place}-{kind}"
                few = thin(y, hovers)
                (points,) = axes.plot(x[few], y[few], "o", color=shade, markersize=9, alpha=0.01)
                points.set_gid(gid)
                titles[gid] = [
                    f"{label or caption}: {number(float(y[index]))} at {x[index]:,.0f} {over}" for index in few
                ]
            for count, (tokens, start) in enumerate(_restarts(model)[-50:]):
                mark = axes.axvline(tokens, color=color, linewidth=1, linestyle=":")
                mark.set_gid(f"restart-{place}-{count}")
                titles[f"restart-{place}-{count}"] = f"{model.name}: {start}"
        if column == "grad_norm":
            for limit in sorted({model.experiment.train.clip_grad for model in models if model.experiment}):
                axes.axhline(limit, color="gray", linewidth=1, linestyle="--", label=f"clipped to {limit:g}")
        axes.set_xlabel(over, fontsize=9)
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=" "))
        if column == "tokens_per_second":
            axes.yaxis.set_major_formatter(ticker.EngFormatter(sep=" "))
        if column != "lm_loss":
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.tick_params(labelsize=9)
        axes.grid(axis="y")
        _, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            figure.legend(loc="outside lower center", ncols=2, fontsize=9)
        return as_svg(figure, f"{caption}, over {over}; the table below has the numbers", titles)


def curve_rows(model: Model) -> list[dict[str, Any]]:
    """The charts as numbers: at most ROWS evenly spaced rows of a model's curve, with the last."""
    curve, tokens = model.train, _tokens(model, model.train)
    places = sorted({*np.linspace(0, len(curve) - 1, min(len(curve), ROWS)).astype(int).tolist()})
    valid = dict(zip(model.valid.values("iteration").tolist(), model.valid.values("loss").tolist(), strict=False))

    def cell(name: str, place: int) -> float | None:
        column = curve.values(name)
        return float(column[place]) if len(column) and math.isfinite(column[place]) else None

    return [
        {
            "iteration": int(curve.values("iteration")[place]),
            "tokens": int(tokens[place]),
            "valid": valid.get(curve.values("iteration")[place]),
            **{name: cell(name, place) for name in (*PANELS, "mfu")},
        }
        for place in places
    ]


def comparisons(model: Model) -> list[tuple[str, str, str]]:
    """(name, planned, used) of layout, memory, speed, time and starts, where both are known."""
    plan, experiment, memory = model.plan or {}, model.experiment, memory_use(model)
    source = (model.merged or {}).get("source", {}).get("layout", "")
    planned = {key: plan[key] for key in ("tokens_per_second", "seconds") if plan.get(key)}
    speed = number(float(planned["tokens_per_second"])) if "tokens_per_second" in planned else ""
    seen = model.train.values("tokens_per_second")
    middle = float(np.nanmedian(seen)) if np.isfinite(seen).any() else 0.0
    mfu = model.train.values("mfu")
    share = f", {np.nanmedian(mfu):.1%} of the device's peak" if np.isfinite(mfu).any() else ""
    time = duration(planned["seconds"]) if "seconds" in planned else ""
    rows = [
        ("layout", plan.get("layout") or (experiment.parallel.factors if experiment else ""), source),
        *([("memory per GPU", f"{memory[0] / _GIB:.2f} GiB", f"{memory[1] / _GIB:.2f} GiB at most")] if memory else []),
        ("tokens per second", speed, f"{number(middle)} in the median{share}" if middle else ""),
        ("time of the iterations", time, duration(model.seconds) if model.seconds else ""),
        *([("starts", "1", str(len(model.starts)))] if len(model.starts) > 1 else []),
    ]
    return [row for row in rows if all(row[1:])]


def memory_use(model: Model) -> tuple[float, float] | None:
    """Predicted and measured peak of what a training allocates on a GPU, in bytes; or None.

    Without CUDA's context; NCCL's buffers are in the prediction alone. None on CPUs: train.csv has
    the resident memory of the process there, with all libraries and mapped files.
    """
    planned, used = (model.plan or {}).get("memory") or {}, model.train.values("memory_mb")
    if not planned or not np.isfinite(used).any() or (model.card or {}).get("device", "CPU") == "CPU":
        return None
    return sum(planned.values()) - planned.get("context", 0), float(np.nanmax(used)) * 2**20


def memory_chart(models: Sequence[Model]) -> list[Bar]:
    """Predicted memory of each model by part, and the measured one if they are comparable."""
    bars = []
    for model in models:
        if parts := dict((model.plan or {}).get("memory") or {}):
            context = parts.pop("context", 0)
            named = [(f"{part} {readable_bytes(held)}", held) for part, held in parts.items()]
            predicted = f"{readable_bytes(sum(parts.values()))} per process predicted"
            bars.append(Bar(f"{model.name}: {predicted}, and {readable_bytes(context)} for the process itself", named))
        if memory := memory_use(model):
            used = f"{readable_bytes(memory[1])} used at most"
            bars.append(Bar(f"{model.name}: {used}", [(used, memory[1])]))
    return bars
