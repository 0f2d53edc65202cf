"""The funnel as a drawing: a bar per step, what survives in one colour, each reason for a drop in another."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from common.page import COLORS, WIDTH, as_svg, figure_style, size
from report.funnel import Step

_REASONS = 4  # drawn by themselves; the others share the last colour
_LETTERS = 64  # of the line under a bar, at 9 points


def documents_chart(steps: Sequence[Step]) -> Markup:
    """Documents into each step: those that survive, and those that were dropped by reason."""
    titles: dict[str, str] = {}
    widest = max(1, *(step.documents_in for step in steps))
    with figure_style("funnel"):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(WIDTH, 0.2 + 0.76 * len(steps)), layout="constrained")
        for row, step in enumerate(steps):
            parts = [("kept", step.documents_out), *_first_reasons(step)]
            left = 0
            for number, (name, count) in enumerate(parts):
                (bar,) = axes.barh(row, count, left=left, height=0.34, color=COLORS[number])
                bar.set_gid(f"bar-{row}-{number}")
                titles[f"bar-{row}-{number}"] = f"{step.name}: {count:,} {step.unit} {name}"
                left += count
            kept = f"{step.documents_out:,} of {step.documents_in:,} {step.unit}"
            axes.text(0, row - 0.24, f"{step.name}: {kept}", fontsize=10, va="bottom")
            axes.text(0, row + 0.21, _drops(step), fontsize=9, va="top", alpha=0.8)
        axes.set_xlim(0, widest)
        _bare(axes, len(steps))
        return as_svg(figure, "Documents that survive each step, and why the others were dropped", titles)


def bytes_chart(steps: Sequence[Step]) -> Markup:
    """Bytes of text out of each step that has texts, and tokens where they are counted."""
    texts = [step for step in steps if step.unit != "URLs"]
    titles: dict[str, str] = {}
    with figure_style("bytes"):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(WIDTH, 0.2 + 0.76 * len(texts)), layout="constrained")
        for row, step in enumerate(texts):
            (bar,) = axes.barh(row, step.bytes_out, height=0.34, color=COLORS[0 if step.tokens is None else 2])
            bar.set_gid(f"bytes-{row}")
            tokens = "" if step.tokens is None else f" = {step.tokens:,} tokens"
            titles[f"bytes-{row}"] = f"{step.name}: {step.bytes_out:,} bytes{tokens}"
            axes.text(0, row - 0.24, f"{step.name}: {size(step.bytes_out)}{tokens}", fontsize=10, va="bottom")
        axes.set_xlim(0, max(1, *(step.bytes_out for step in texts)))
        _bare(axes, len(texts))
        return as_svg(figure, "Bytes of text out of each step; of tokens, those of the token files", titles)


def _first_reasons(step: Step) -> list[tuple[str, int]]:
    """The most frequent reasons, and the sum of the others."""
    first, rest = step.reasons[:_REASONS], step.reasons[_REASONS:]
    named = [(f"dropped: {reason}", count) for reason, count in first]
    return [*named, *([("dropped for other reasons", sum(count for _, count in rest))] if rest else [])]


def _drops(step: Step) -> str:
    """`8 dropped: 3 duplicate, 2 malformed, …`, as long as a line is."""
    if not step.reasons:
        return ""
    text = f"{step.dropped:,} dropped:"
    for place, (reason, count) in enumerate(step.reasons):
        more = f"{',' if place else ''} {count:,} {reason}"
        if len(text) + len(more) > _LETTERS:
            return f"{text}, …"
        text += more
    return text


def _bare(axes: Any, rows: int) -> None:
    """No axes: the bars carry their numbers."""
    axes.set_ylim(rows - 0.4, -0.62)
    axes.set_axis_off()
