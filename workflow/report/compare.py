"""Compare runs: the keys and figures that differ, and the losses of all models in one chart."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import page
from common.config import read_yaml
from common.errors import InputError
from workflow.report.funnel import funnel
from workflow.report.models import settings_of, trained_models
from workflow.report.training import PANELS, curve_charts

Figures = dict[tuple[str, str], Any]
"""Values by (section of the configuration, step or model; key or figure)."""


def figures(run: Path) -> Figures:
    """The configuration of a run, the counts of its steps, the losses and scores of its models."""
    config = run / "config.yaml"  # written when the run started
    by_key = _flat(read_yaml(config)) if config.is_file() else {}
    by_key.pop(("configuration", "run"), None)
    steps = funnel(run, settings_of(config) if config.is_file() else None)
    for step in steps:
        by_key[step.name, f"{step.unit} in"] = step.documents_in
        by_key[step.name, f"{step.unit} kept"] = step.documents_out
        by_key |= {(step.name, f"dropped: {reason}"): count for reason, count in step.reasons}
        volume, size = ("bytes out", step.bytes_out) if step.tokens is None else ("tokens", step.tokens)
        by_key[step.name, volume] = size
    models = trained_models(run)
    if not steps and not models:
        raise InputError(f"{run}: no stats.json or train.csv below it; name the folder of a run")
    for model in models:
        evaluation = model.evaluation or {}
        values = {
            "parameters": model.parameters,
            "tokens seen": model.tokens,
            "epochs": model.epochs,
            "training loss, last interval": model.train_loss,
            "validation loss": model.valid_loss,
            "evaluated loss": evaluation.get("loss"),
            "bits per byte": evaluation.get("bits_per_byte"),
            "test loss": (model.test or {}).get("loss"),
            **{f"{row['task']}, {row['metric']}": row["value"] for row in evaluation.get("tasks", [])},
        }
        by_key |= {(model.name, name): value for name, value in values.items() if value is not None}
    return by_key


def _flat(value: Any, name: str = "") -> Figures:
    """`{"configuration", "clean.language"}: …` of nested settings; a list is one value."""
    if not isinstance(value, dict):
        return {("configuration", name): value}
    return {key: each for inner in value for key, each in _flat(value[inner], f"{name}.{inner}".lstrip(".")).items()}


def render(runs: Sequence[Path]) -> str:
    """The comparison as HTML; changes are from the first run.

    Raises InputError for a folder that is no run.
    """
    short = [run.resolve().name for run in runs]
    names = short if len({*short}) == len(short) else [str(run) for run in runs]
    by_run = [figures(run) for run in runs]
    keys = list(dict.fromkeys(key for each in by_run for key in each))
    sections = list(dict.fromkeys(section for section, _ in keys))
    rows = [
        (*key, [each.get(key, 0 if key[1].startswith("dropped: ") else None) for each in by_run])
        for key in sorted(keys, key=lambda key: sections.index(key[0]))
    ]
    differing = [row for row in rows if any(value != row[2][0] for value in row[2])]
    models = [
        replace(model, name=f"{name}: {model.name}")
        for run, name in zip(runs, names, strict=True)
        for model in trained_models(run)
    ]
    return page.render(
        "workflow.report",
        "compare.html",
        title=", ".join(names),
        names=names,
        runs=runs,
        rows=differing,
        equal=len(rows) - len(differing),
        change=_change,
        shown=_shown,
        charts=curve_charts(models, {"lm_loss": PANELS["lm_loss"]}),
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.6g}"
    return "" if value is None else f"{value:,}" if type(value) is int else str(value)


def _change(value: Any, first: Any) -> tuple[str, str]:
    """`("+12", "+3.4%")`; empty if they are not two different numbers."""
    if not all(type(each) in (int, float) for each in (value, first)) or value == first:
        return "", ""
    change = value - first
    shown = ("+" if change > 0 else "") + _shown(round(change, 6))
    return shown, f"{change / first:+.1%}" if first else ""
