"""When each step of the run worked: from the times of its files, and from the clocks of the steps that have one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from markupsafe import Markup

from common.page import COLORS, WIDTH, as_svg, duration, figure_style
from report.funnel import Job, Step
from report.models import Model

_BARS = 40  # of a step in the chart; more shards are one bar


@dataclass(frozen=True)
class Work:
    """A step of the DAG."""

    name: str
    jobs: list[Job] = field(default_factory=list)
    clock: bool = True
    """Whether the step measured itself; otherwise it is the time from its inputs to its output, waiting included."""

    @property
    def started(self) -> float:
        """Unix time."""
        return min(job.ended - job.seconds for job in self.jobs)

    @property
    def ended(self) -> float:
        """Unix time."""
        return max(job.ended for job in self.jobs)

    @property
    def ordered(self) -> list[Job]:
        """The jobs, the fastest first."""
        return sorted(self.jobs, key=lambda job: job.seconds)


def timeline(run: Path, steps: Sequence[Step], models: Sequence[Model]) -> list[Work]:
    """The steps of a run in the order in which they began."""
    found = [Work(step.name, step.jobs) for step in steps]
    ends = {work.name: work.ended for work in found}
    tokenizer = run / "tokenizer" / "stats.json"
    found += _between("train_tokenizer", [run / "dedup" / "0000.stats.json"], tokenizer)
    found += _since("dedup: pairs, clusters", ends.get("clean"), run / "dedup" / "clusters.json")
    for model in models:
        folder, merged = run / "models" / model.name, run / "merged" / model.name / "merge_report.json"
        done, sample, result = folder / "done.json", f"samples/{model.name}.txt", f"evaluation/{model.name}.json"
        first = float(model.starts[0]["time"]) if model.starts else ends.get("merge_index")
        found += _since(f"train {model.name}", first, done)
        found += _between(f"merge {model.name}", [done], merged)
        found += _between(f"evaluate {model.name}", [merged], run / result)
        found += _between(f"generate {model.name}", [merged], run / sample)
    return sorted((work for work in found if work.jobs), key=lambda work: work.started)


def _between(name: str, inputs: Sequence[Path], output: Path) -> list[Work]:
    ready = max((path.stat().st_mtime for path in inputs if path.exists()), default=None)
    return _since(name, ready, output)


def _since(name: str, ready: float | None, output: Path) -> list[Work]:
    """A step without a clock, from when its inputs were there; none if it has not run, or its inputs came later."""
    if ready is None or not output.exists():
        return []
    ended = output.stat().st_mtime
    return [Work(name, [Job("", ended - ready, ended)], clock=False)] if ended >= ready else []


def gantt_chart(works: Sequence[Work]) -> Markup:
    """A row per step over the time since the first began; a bar per shard if there are few."""
    begin = min(work.started for work in works)
    end = max(work.ended for work in works)
    unit, length = next(
        (name, scale)
        for name, scale in (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
        if end - begin >= 2 * scale or scale == 1
    )
    least = (end - begin) / 300  # shorter bars could not be seen
    titles: dict[str, str] = {}
    with figure_style("gantt"):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(WIDTH, 0.7 + 0.3 * len(works)), layout="constrained")
        for row, work in enumerate(works):
            several = 1 < len(work.jobs) <= _BARS
            spans = [(job, job.ended - job.seconds, job.ended) for job in work.jobs] if several else []
            for place, (job, started, ended) in enumerate(spans or [(None, work.started, work.ended)]):
                width = max(ended - started, least) / length
                height = 0.66 / max(1, len(spans))
                top = row - 0.33 + place * height if spans else row
                (bar,) = axes.barh(
                    top, width, left=(started - begin) / length, height=height * (1 if not spans else 0.9),
                    align="edge" if spans else "center", color=COLORS[0 if work.clock else 5],
                )  # fmt: skip
                bar.set_gid(f"job-{row}-{place}")
                what = f"{work.name} {job.label}" if job else work.name
                jobs = f", {len(work.jobs):,} shards" if len(work.jobs) > 1 and not job else ""
                titles[f"job-{row}-{place}"] = (
                    f"{what}: {duration(ended - started)}{jobs}, {duration(started - begin)} after the start"
                )
        axes.set_yticks(range(len(works)), [work.name for work in works], fontsize=9)
        axes.set_ylim(len(works) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.tick_params(left=False, labelsize=9)
        axes.set_xlabel(f"{unit} since the first step began", fontsize=9)
        axes.grid(axis="x")
        return as_svg(figure, "When each step worked; the table below has the numbers", titles)


def shards_chart(works: Sequence[Work]) -> Markup | None:
    """Seconds per shard of each step that has several: smallest to largest, the middle 90 %, and the median."""
    sharded = [work for work in works if len(work.jobs) > 1]
    if not sharded:
        return None
    titles: dict[str, str] = {}
    with figure_style("shards"):
        from matplotlib import pyplot, ticker

        figure, axes = pyplot.subplots(figsize=(WIDTH, 0.7 + 0.34 * len(sharded)), layout="constrained")
        for row, work in enumerate(sharded):
            low, early, middle, late, high = quantiles(work.jobs)
            axes.plot([low, high], [row, row], color=COLORS[0], linewidth=1.2)
            (bar,) = axes.plot(
                [early, late], [row, row], color=COLORS[0], linewidth=7, solid_capstyle="butt", alpha=0.5
            )
            axes.plot([middle], [row], "|", color=COLORS[1], markersize=13, markeredgewidth=2)
            bar.set_gid(f"shards-{row}")
            spread = f"{duration(low)} to {duration(high)}, median {duration(middle)}"
            titles[f"shards-{row}"] = f"{work.name}: {len(work.jobs):,} shards, {spread}"
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_yticks(range(len(sharded)), [work.name for work in sharded], fontsize=9)
        axes.set_ylim(len(sharded) - 0.5, -0.5)
        axes.tick_params(left=False, labelsize=9)
        axes.set_xlabel("seconds per shard", fontsize=9)
        axes.grid(axis="x")
        return as_svg(figure, "Seconds per shard; the table below has the numbers", titles)


def quantiles(jobs: Sequence[Job]) -> tuple[float, float, float, float, float]:
    """Seconds: smallest, 5 %, median, 95 %, largest; at least a millisecond each, for a logarithmic axis."""
    low, early, middle, late, high = np.quantile([max(job.seconds, 0.001) for job in jobs], (0, 0.05, 0.5, 0.95, 1))
    return float(low), float(early), float(middle), float(late), float(high)
