"""Bar charts that several sections share."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from common.page import COLORS, WIDTH, as_svg, figure_style

_MOST = 14  # bars of a chart; the rest is summed up in one more


@dataclass(frozen=True)
class Bar:
    """A horizontal bar of coloured parts, below the line that says what it is."""

    above: str
    parts: Sequence[tuple[str, float]]
    """(what a pointer reads, length) of each part."""
    below: str = ""


def lumped(counts: Sequence[tuple[str, int]], rest: int = 0) -> list[tuple[str, int]]:
    """The largest counts, and the sum of the others (plus `rest`, what was never told apart)."""
    ordered = sorted(counts, key=lambda item: (-item[1], item[0]))
    first, last = ordered[:_MOST], ordered[_MOST:]
    others = sum(count for _, count in last) + rest
    return [*first, ("others", others)] if others else first


def share_bars(counts: Sequence[tuple[str, int]], unit: str) -> list[Bar]:
    """A bar per name, with its count and its share of all."""
    everything = sum(count for _, count in counts) or 1
    shares = [(f"{name}: {count:,} {unit}, {count / everything:.1%}", count) for name, count in counts]
    return [Bar(text, [(text, count)]) for text, count in shares]


def bars_chart(name: str, label: str, bars: Sequence[Bar]) -> Markup:
    """The bars below each other, without axes: they carry their numbers."""
    titles: dict[str, str] = {}
    height = 0.76 if any(bar.below for bar in bars) else 0.52  # inches
    with figure_style(name):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(WIDTH, 0.2 + height * len(bars)), layout="constrained")
        for row, bar in enumerate(bars):
            left = 0.0
            for number, (title, length) in enumerate(bar.parts):
                (drawn,) = axes.barh(row, length, left=left, height=0.34, color=COLORS[number % len(COLORS)])
                drawn.set_gid(f"bar-{row}-{number}")
                titles[f"bar-{row}-{number}"] = title
                left += length
            axes.text(0, row - 0.24, bar.above, fontsize=10, va="bottom")
            axes.text(0, row + 0.21, bar.below, fontsize=9, va="top", alpha=0.8)
        axes.set_xlim(0, max([1e-9, *(sum(length for _, length in bar.parts) for bar in bars)]))
        axes.set_ylim(len(bars) - 0.4, -0.62)
        axes.set_axis_off()
        return as_svg(figure, label, titles)


def histogram_chart(
    name: str, label: str, bins: Sequence[str], series: Sequence[tuple[str, Sequence[int]]], axis: str, unit: str
) -> Markup:
    """Groups of bars, one group per bin and one bar per series; logarithmic if the counts are far apart."""
    titles: dict[str, str] = {}
    with figure_style(name):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(WIDTH, 2.7), layout="constrained")
        width = 0.8 / len(series)
        for number, (kind, counts) in enumerate(series):
            lefts = [place - 0.4 + number * width for place in range(len(bins))]
            drawn = axes.bar(lefts, counts, width=width * 0.94, align="edge", color=COLORS[number], label=kind)
            for place, (bar, count) in enumerate(zip(drawn, counts, strict=True)):
                bar.set_gid(f"bar-{number}-{place}")
                titles[f"bar-{number}-{place}"] = f"{bins[place]}: {count:,} {unit}" + f", {kind}" * (len(series) > 1)
        counts_above_0 = [count for _, counts in series for count in counts if count]
        if counts_above_0 and max(counts_above_0) > 100 * min(counts_above_0):
            axes.set_yscale("log")
            axes.set_ylim(bottom=0.5)
        many = len(bins) > 8
        axes.set_xticks(
            range(len(bins)), bins, fontsize=9, rotation=60 if many else 0, ha="right" if many else "center"
        )
        axes.tick_params(bottom=False)
        axes.set_xlabel(axis, fontsize=9)
        axes.set_ylabel(unit, fontsize=9)
        axes.grid(axis="y")
        if len(series) > 1:
            figure.legend(loc="outside upper right", ncols=2, fontsize=9)
        return as_svg(figure, label, titles)
