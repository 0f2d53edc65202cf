"""A training's layout, predicted memory and speed beside what it used, and the card of its merged checkpoint."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from common.page import duration, number
from report.drawing import Bar, bars_chart
from report.models import Model

GIB = 2**30


class Comparison(NamedTuple):
    """One line: what was planned, and what came."""

    name: str
    planned: str
    used: str


def comparisons(model: Model) -> list[Comparison]:
    """Layout, batch, memory per process, speed and time of a model; a figure that is not known is empty."""
    plan, experiment, peak = model.plan or {}, model.experiment, _peak(model)
    source = (model.merged or {}).get("source", {}).get("layout", "")
    planned = {key: plan[key] for key in ("memory_bytes", "tokens_per_second", "seconds") if plan.get(key)}
    batch = experiment and f"{experiment.train.global_batch_size:,} samples of {experiment.model.seq_len:,} tokens"
    memory = f"{planned['memory_bytes'] / GIB:.2f} GiB" if "memory_bytes" in planned else ""
    speed = number(float(planned["tokens_per_second"])) if "tokens_per_second" in planned else ""
    seen = model.train.values("tokens_per_second")
    middle = float(np.nanmedian(seen)) if np.isfinite(seen).any() else 0.0
    time = duration(planned["seconds"]) if "seconds" in planned else ""
    rows = [
        Comparison("layout", plan.get("layout") or (experiment.parallel.factors if experiment else ""), source),
        Comparison("batch", batch or "", ""),
        Comparison("memory per process", memory, f"{peak / GIB:.2f} GiB at most" if peak else ""),
        Comparison("tokens per second", speed, f"{number(middle)} in the median" if middle else ""),
        Comparison("time of the iterations", time, duration(model.seconds) if model.seconds else ""),
        *([Comparison("starts", "1", str(len(model.starts)))] if len(model.starts) > 1 else []),
    ]
    return [row for row in rows if row.planned or row.used]


def _peak(model: Model) -> float:
    """Bytes of the process that used most."""
    used = model.train.values("memory_mb")
    return float(np.nanmax(used)) * 1e6 if np.isfinite(used).any() else 0.0


def memory_chart(models: Sequence[Model]) -> Markup | None:
    """Per model, the predicted memory by part and what was used; None if no model has a prediction."""
    bars = []
    for model in models:
        if parts := {part: held / GIB for part, held in ((model.plan or {}).get("memory") or {}).items()}:
            titles = [(f"{model.name}: {part} {held:.3g} GiB predicted", held) for part, held in parts.items()]
            listed = ", ".join(f"{part} {held:.2g}" for part, held in parts.items())
            bars.append(Bar(f"{model.name}: {sum(parts.values()):.2f} GiB per process predicted", titles, listed))
            used = f"{model.name}: {_peak(model) / GIB:.3g} GiB used at most"
            bars.append(Bar(used, [(used, _peak(model) / GIB)]))
    label = "Predicted memory by part, and the memory that was used"
    return bars_chart("predicted-memory", label, bars) if bars else None


class Card(NamedTuple):
    """What a person checks before they use the weights of a merged checkpoint."""

    name: str
    facts: list[tuple[str, str]]
    files: list[tuple[str, int, str]]
    """(name, bytes, xxh3)."""


def card_of(model: Model) -> Card | None:
    """The card of a model; None if it has not been merged."""
    if model.merged is None:
        return None
    merged: dict[str, Any] = model.merged
    source, shape = merged.get("source", {}), merged.get("model", {})
    proof, replicas = merged.get("proof"), merged.get("replicas") or {}
    words = {
        "n_layer": "layers",
        "n_embd": "wide",
        "n_head": "heads",
        "n_positions": "positions",
        "vocab_size": "words",
    }
    sizes = ", ".join(f"{shape[key]:,} {word}" for key, word in words.items() if key in shape)
    samples = f", {source['consumed_samples']:,} samples" if source.get("consumed_samples") is not None else ""
    facts = {
        "source": ", ".join(filter(None, (source.get("path"), source.get("layout")))),
        "iteration": f"{source['iteration']:,}{samples}" if source.get("iteration") is not None else "",
        "architecture": f"GPT-2, {sizes}{', tied head' if shape.get('tied') else ''}" if sizes else "",
        "weights": str(shape.get("dtype", "")),
        "replicas": (
            f"{replicas['equal']:,} of {replicas['compared']:,} compared are equal" if replicas.get("compared") else ""
        ),
        "proof": proof
        and f"logits of {proof['tokens']:,} tokens equal the source's within {proof['largest_difference']:.2g} "
        f"({proof['relative_difference']:.2g} of the largest; {proof['tolerance']:.2g} is allowed)",
        "notes": "; ".join(merged.get("notes", [])),
    }
    files = {**merged.get("output", {}), **model.files}
    listed = [(name, int(entry["size"]), str(entry["xxh3"])) for name, entry in sorted(files.items())]
    return Card(model.name, [(name, value) for name, value in facts.items() if value], listed)
