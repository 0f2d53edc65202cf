"""Bars and histograms that several sections share."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from common.page import COLORS, WIDTH, as_svg, figure_style


@dataclass(frozen=True)
class Bar:
    """A horizontal bar of coloured parts, with a caption above and a legend of the parts."""

    above: str
    parts: Sequence[tuple[str, float]]
    """(label, length) of each part."""
    breakdown: Sequence[tuple[str, float]] = ()
    """(label, length) of what the last part is made of: a thin bar below that part."""

    @property
    def length(self) -> float:
        """Total of all parts."""
        return sum(length for _, length in self.parts)


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
