"""What the ranks of a job report about their nodes, as a table, and what is wrong with a node.

    node   device          driver     threads  memory free      clock  disk free  write      all-reduce (ms)
    node1  8 x H100 80GB   550.54.15  8 of 64  78.9 of 79.1 GB  same   812.3 GB   1200 MB/s  dp 2.10, tp 0.90
    node2  8 x H100 80GB   550.54.15  8 of 64  78.9 of 79.1 GB  same   812.3 GB   900 MB/s   dp 2.20, tp 0.90

Measured by `training.parallel.preflight`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from common.tables import text_table

_SKEW = 5.0  # seconds between two clocks that are worth a warning
_SLOW = 5.0  # times the median that are worth a warning, for an all-reduce
_JITTER = 0.02  # seconds that an all-reduce may take in any case: another process had the core
_EQUAL = ("device", "driver")  # what a job expects to be equal on all nodes


@dataclass
class Report:
    """What one rank has measured; sizes in bytes, times in seconds."""

    rank: int
    node: str
    device: str
    driver: str
    threads: int
    cores: int
    memory_free: int
    memory_total: int
    disk_free: int | None = None
    """None: the file system does not say."""
    write_speed: float | None = None
    """Bytes per second; None on all but the first process of a node."""
    skew: float = 0.0
    """This rank's clock minus rank 0's, at least; 0 if they may be equal."""
    problem: str = ""
    """Why the model folder cannot be used from here."""
    reduced: dict[str, float] = field(default_factory=dict)
    """Seconds of an all-reduce, by axis of the mesh."""


def _by_node(reports: Sequence[Report]) -> dict[str, list[Report]]:
    nodes: dict[str, list[Report]] = {}
    for report in reports:
        nodes.setdefault(report.node, []).append(report)
    return nodes


def _gigabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.1f} GB"


def describe(reports: Sequence[Report]) -> str:
    """The table: one row per node, each cell the worst of its ranks."""
    rows = [("node", "device", "driver", "threads", "memory free", "clock", "disk free", "write", "all-reduce (ms)")]
    for node, ranks in _by_node(reports).items():
        first, fullest = ranks[0], min(ranks, key=lambda report: report.memory_free)
        skew = max((report.skew for report in ranks), key=abs)
        disk = min((report.disk_free for report in ranks if report.disk_free is not None), default=None)
        speed = min((report.write_speed for report in ranks if report.write_speed is not None), default=None)
        axes = [f"{axis} {1e3 * max(r.reduced[axis] for r in ranks):.2f}" for axis in first.reduced]
        rows.append(
            (
                node,
                f"{len(ranks)} x {first.device}",
                first.driver,
                f"{first.threads} of {first.cores}",
                f"{fullest.memory_free / 1e9:.1f} of {_gigabytes(fullest.memory_total)}",
                f"{skew:+.1f} s" if skew else "same",
                _gigabytes(disk),
                "-" if speed is None else f"{speed / 1e6:.0f} MB/s",
                ", ".join(axes) or "-",
            )
        )
    return text_table(rows)


def find_warnings(reports: Sequence[Report]) -> list[str]:
    """What is odd on a node, one line per kind and node; training continues."""
    found = []
    medians = {axis: median(report.reduced[axis] for report in reports) for axis in reports[0].reduced}
    usual = {name: Counter(getattr(report, name) for report in reports).most_common(1)[0][0] for name in _EQUAL}
    free = median(report.memory_free for report in reports)
    for node, ranks in _by_node(reports).items():
        skew = max((report.skew for report in ranks), key=abs)
        if abs(skew) > _SKEW:
            found.append(f"{node}: its clock is {skew:+.1f} s off rank 0's on {reports[0].node}; does NTP run there?")
        for axis, usually in medians.items():
            slowest = max(report.reduced[axis] for report in ranks)
            if slowest > max(_SLOW * usually, _JITTER):
                found.append(
                    f"{node}: an all-reduce over {axis} takes {1e3 * slowest:.1f} ms, {slowest / usually:.0f} times "
                    f"the median of {1e3 * usually:.1f} ms; its network or a device is slow"
                )
        for name in _EQUAL:
            other = next((getattr(r, name) for r in ranks if getattr(r, name) != usual[name]), None)
            if other is not None:
                found.append(f"{node}: {name} {other}, elsewhere {usual[name]}")
        if (worst := min(report.memory_free for report in ranks)) < free / 2:
            found.append(f"{node}: {_gigabytes(worst)} of memory free, elsewhere {_gigabytes(free)}")
        if ranks[0].threads > ranks[0].cores:
            found.append(f"{node}: {ranks[0].threads} threads per process on {ranks[0].cores} cores")
    return found


def find_error(reports: Sequence[Report], folder: Path, needed: int) -> str:
    """Why the job cannot run, with the name of the first node that says so; empty if it can."""
    bad = [(report, problem) for report in reports if (problem := _problem(report, needed))]
    if not bad:
        return ""
    report, problem = bad[0]
    others = len({other.node for other, _ in bad} - {report.node})
    more = f" (and {others} more nodes)" if others else ""
    return f"preflight: {report.node}{more}: {folder}: {problem}"


def _problem(report: Report, needed: int) -> str:
    if report.problem:
        return report.problem
    if report.disk_free is not None and report.disk_free < needed:
        return f"{_size(report.disk_free)} free, a checkpoint has {_size(needed)}; free space, or change `run`"
    return ""


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
