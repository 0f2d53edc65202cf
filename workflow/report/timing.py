"""Start, end and peak memory of each step, from the logs of its jobs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from markupsafe import Markup

from common import job_log
from common.page import COLORS, WIDTH, as_svg, duration, figure_style
from workflow.report.models import Model

_FEW = 5  # jobs: of fewer, neither a median nor a slowest one
_NOT_DRAWN = ("train", "report", "cards")  # a job that waits for another one; the page itself


@dataclass(frozen=True)
class Job:
    """One shard of a step, or the whole of it."""

    label: str
    """`0007`; empty for a step that has one job."""
    seconds: float
    memory_mb: int | None
    """Largest process; None if it is not known."""
    ended: float
    """Unix time."""


@dataclass(frozen=True)
class Work:
    """A step of the DAG."""

    name: str
    jobs: list[Job]

    @property
    def started(self) -> float:
        """Unix time."""
        return min(job.ended - job.seconds for job in self.jobs)

    @property
    def ended(self) -> float:
        """Unix time."""
        return max(job.ended for job in self.jobs)

    @property
    def memory_mb(self) -> int | None:
        """Largest process of all jobs."""
        return max((job.memory_mb for job in self.jobs if job.memory_mb is not None), default=None)

    @property
    def spread(self) -> tuple[float, Job] | None:
        """Seconds of the median and of the slowest job; None if there are too few jobs."""
        if len(self.jobs) < _FEW:
            return None
        return float(np.median([job.seconds for job in self.jobs])), max(self.jobs, key=lambda job: job.seconds)


class Clock:
    """Seconds since the first job began; time in which no job ran does not count."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._moments, self._seconds = [0.0], [0.0]  # alternately the begin and the end of a time with jobs
        for began, ended in sorted((job.ended - job.seconds, job.ended) for work in works for job in work.jobs):
            done = self._seconds[-1]
            self._moments += [max(began, self._moments[-1]), max(ended, self._moments[-1])]
            self._seconds += [done, done + self._moments[-1] - self._moments[-2]]

    def at(self, moment: float) -> float:
        """The clock at a Unix time."""
        return float(np.interp(moment, self._moments, self._seconds))


def timeline(run: Path, models: Sequence[Model], shards: int | None = None) -> list[Work]:
    """The steps of a run in the order in which they began; of each, the first `shards` shards."""
    works = []
    for model in models:
        done = run / "models" / model.name / "done.json"
        if model.starts and done.exists():
            curve = done.with_name("train.csv")  # a finished training that is started again writes only done.json
            ended = min(path.stat().st_mtime for path in (done, curve))
            works.append(Work(f"train {model.name}", list(_starts(model, ended))))
    folder = run / "logs"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.stem not in _NOT_DRAWN:
            works += _works(path, shards)
    return sorted(works, key=lambda work: work.started)


def _starts(model: Model, done: float) -> Iterator[Job]:
    """The starts of a training that ended at `done`; each ends with its last kept iteration."""
    starts = [(float(row["time"]), int(row["iteration"])) for row in model.starts]
    for number, (began, iteration) in enumerate(starts, 1):
        ended = done
        if number < len(starts):
            ended = min(starts[number][0], began + model.seconds_between(iteration, starts[number][1]))
        yield Job(f"start {number}" if len(starts) > 1 else "", ended - began, None, ended)


def _works(path: Path, shards: int | None) -> Iterator[Work]:
    """The work of RULE.log, of all RULE/0007.log together, or of each model's RULE/NAME.log."""
    logs = sorted(path.glob("*.log")) if path.is_dir() else [path]
    jobs = [Job(log.stem, *time) for log in logs if "." not in log.stem and (time := job_log.read(log))]
    if not path.is_dir():
        yield from (Work(path.stem, [replace(job, label="")]) for job in jobs)
        return
    # an earlier configuration may have had more shards; `0003` is a shard, `3` is not
    numbered = [job for job in jobs if job.label.isdigit()]
    parts = [job for job in numbered if shards is None or len(job.label) < 4 or int(job.label) < shards]
    if parts:
        yield Work(path.name, parts)
    yield from (Work(f"{path.name} {job.label}", [replace(job, label="")]) for job in jobs if not job.label.isdigit())


def gantt_chart(works: Sequence[Work]) -> Markup:
    """A bar per step over the time since the first began."""
    clock = Clock(works)
    end = clock.at(max(work.ended for work in works))
    unit, length = next(
        (name, scale)
        for name, scale in (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
        if end >= 2 * scale or scale == 1
    )
    titles: dict[str, str] = {}
    with figure_style("gantt"):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(WIDTH, 0.7 + 0.3 * len(works)), layout="constrained")
        for row, work in enumerate(works):
            started, took = clock.at(work.started), clock.at(work.ended) - clock.at(work.started)
            width = max(took, end / 300)  # a shorter bar could not be seen
            (bar,) = axes.barh(row, width / length, left=started / length, height=0.66, color=COLORS[0])
            bar.set_gid(f"job-{row}")
            jobs = f", {len(work.jobs):,} shards" if len(work.jobs) > 1 else ""
            titles[f"job-{row}"] = f"{work.name}: {duration(took)}{jobs}, {duration(started)} after the start"
        axes.set_yticks(range(len(works)), [work.name for work in works], fontsize=9)
        axes.set_ylim(len(works) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.tick_params(left=False, labelsize=9)
        axes.set_xlabel(f"{unit} of work since the first step began", fontsize=9)
        axes.grid(axis="x")
        return as_svg(figure, "When each step worked; the table below has the numbers", titles)
