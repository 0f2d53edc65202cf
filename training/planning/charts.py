"""The figures of the planner's page as SVG: memory by part, and the roofline."""

from collections.abc import Sequence

from markupsafe import Markup

from common.page import COLORS, WIDTH, as_svg, figure_style
from training.planning.machines import GIB
from training.planning.memory import FEASIBLE, PARTS, TIGHT
from training.planning.roofline import work_of
from training.planning.search import Prediction
from training.planning.table import short
from training.planning.terms import by_part

_MARKERS = "osD^v"  # points may lie on each other


def memory_chart(predictions: Sequence[Prediction]) -> Markup:
    """A stacked bar per prediction, against the GPU's memory and the limits of `feasible` and `tight`."""
    titles: dict[str, str] = {}
    memory = predictions[0].machine.memory / GIB
    with figure_style("memory"):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(WIDTH, 1.2 + 0.5 * len(predictions)), layout="constrained")
        for row, prediction in enumerate(predictions):
            parts, left = by_part(prediction.memory), 0.0
            for number, part in enumerate(PARTS):
                held = parts.get(part, 0.0) / GIB
                label = part if row == 0 else None
                (bar,) = axes.barh(row, held, left=left, height=0.42, color=COLORS[number], label=label)
                bar.set_gid(f"bar-{row}-{number}")
                titles[f"bar-{row}-{number}"] = f"{row + 1}: {part} {held:.2f} GiB of {memory:.1f}"
                left += held
            name = f"{row + 1}  {short(prediction.layout)}"
            axes.text(0, row - 0.32, name, fontsize=min(9, 9 * 60 / len(name)))  # 60 letters of 9 pt are as wide
        for share, name in ((FEASIBLE, f"{FEASIBLE:.0%}"), (TIGHT, f"{TIGHT:.0%}"), (1.0, f"{memory:.0f} GiB")):
            axes.axvline(share * memory, color="#b3261e", linewidth=1.2, linestyle="-" if share == 1 else "--")
            axes.text(share * memory, -0.75, name, fontsize=9, ha="left" if share == 1 else "right")
        axes.set_ylim(len(predictions) - 0.5, -0.7)
        axes.set_xlim(
            0, max(memory, *(prediction.memory_bytes / GIB for prediction in predictions)) * 1.1
        )  # room for the name
        axes.set_yticks([])
        axes.set_xlabel("GiB per GPU")
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        figure.legend(loc="outside lower center", ncols=3, fontsize=9)
        return as_svg(figure, "Memory per GPU by part; the table below has the numbers", titles)


def roofline_chart(prediction: Prediction) -> Markup:
    """The GPU's peak and bandwidth, and where each kind of work lies under them; both axes logarithmic."""
    workload, machine = prediction.workload, prediction.machine
    peak, bandwidth = machine.peak_flops(workload.precision), 1e9 * machine.gpu.memory_gb_per_s
    works = work_of(workload, prediction.layout)
    lowest = min(0.1, *(work.intensity / 2 for work in works))
    highest = max(1e4, *(work.intensity * 2 for work in works))
    ridge = peak / bandwidth
    titles: dict[str, str] = {}
    with figure_style("roofline"):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(WIDTH, 3.8), layout="constrained")
        axes.loglog([lowest, ridge], [lowest * bandwidth / 1e12, peak / 1e12], color="#8c8c8c")
        axes.loglog([ridge, highest], [peak / 1e12] * 2, color="#8c8c8c")
        axes.text(highest, peak * 1.35 / 1e12, f"{peak / 1e12:,.0f} TFLOP/s", fontsize=9, ha="right")
        axes.text(lowest, lowest * bandwidth * 8 / 1e12, f"{bandwidth / 1e9:,.0f} GB/s", fontsize=9)
        axes.set_ylim(top=3 * peak / 1e12)
        for number, work in enumerate(works):
            reached = work.attainable(machine, workload.precision) / 1e12
            (point,) = axes.plot(work.intensity, reached, _MARKERS[number], color=COLORS[number], label=work.name)
            point.set_gid(f"work-{number}")
            titles[f"work-{number}"] = f"{work.name}: {work.intensity:,.1f} FLOP/byte, at most {reached:,.1f} TFLOP/s"
        axes.set_xlabel("operations per byte")
        axes.set_ylabel("TFLOP/s")
        axes.grid()
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
        return as_svg(figure, "Roofline of the chosen layout; the table below has the numbers", titles)
