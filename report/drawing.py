"""Bar charts that several sections share."""

from collections.abc import Sequence

from markupsafe import Markup

from common.page import COLORS, WIDTH, as_svg, figure_style

_MOST = 14  # bars of a chart; the rest is summed up in one more


def lumped(counts: Sequence[tuple[str, int]], rest: int = 0) -> list[tuple[str, int]]:
    """The largest counts, and the sum of the others (plus `rest`, what was never told apart)."""
    ordered = sorted(counts, key=lambda item: (-item[1], item[0]))
    first, last = ordered[:_MOST], ordered[_MOST:]
    others = sum(count for _, count in last) + rest
    return [*first, ("others", others)] if others else first


def shares_chart(name: str, label: str, counts: Sequence[tuple[str, int]], unit: str) -> Markup:
    """A horizontal bar per name, with its count and its share of all."""
    everything = sum(count for _, count in counts) or 1
    titles: dict[str, str] = {}
    with figure_style(name):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(WIDTH, 0.5 + 0.27 * len(counts)), layout="constrained")
        for row, (key, count) in enumerate(counts):
            (bar,) = axes.barh(row, count, height=0.62, color=COLORS[4 if key == "others" else 0])
            bar.set_gid(f"bar-{row}")
            titles[f"bar-{row}"] = f"{key}: {count:,} {unit}, {count / everything:.1%}"
            axes.text(count, row, f" {count / everything:.1%}", va="center", fontsize=9)
        axes.set_yticks(range(len(counts)), [_short(key) for key, _ in counts], fontsize=9)
        axes.set_ylim(len(counts) - 0.4, -0.6)
        axes.set_xlim(0, 1.18 * max(1, *(count for _, count in counts)))
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(left=False)
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
            for place, count in enumerate(counts):
                left = place - 0.4 + number * width
                caption = kind if place == 0 else None
                bars = axes.bar(left, count, width=width * 0.94, align="edge", color=COLORS[number], label=caption)
                bars[0].set_gid(f"bar-{number}-{place}")
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


def _short(name: str) -> str:
    return name if len(name) <= 26 else f"{name[:24]}…"
