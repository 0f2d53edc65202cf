"""Scraping: pages per second of corpus.scrape and of other clients, from a loopback server with 200 hosts.

Two tables: fetching alone, per client; and whole scrapes, with the share of the CPU that extraction gets. `--memory
PAGES` measures the memory during one long scrape instead.
"""

import argparse
import contextlib
import gzip
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.machine import alone, table
from common.cli import input_path

_SLOW = 10  # slow clients fetch this many times fewer pages


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--pages", type=int, default=8000, metavar="N", help="pages per round (default 8000)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds per row; medians count (default 5)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="extraction processes (default 2)")
    parser.add_argument(
        "--articles",
        type=input_path,
        metavar="DIR",
        help="serve DIR/html/*.html.gz (default: pages built from Python's help)",
    )
    parser.add_argument("--memory", type=int, metavar="PAGES", help="measure memory during one scrape of PAGES pages")


def _bodies(articles: Path | None) -> list[bytes]:
    if articles is not None:
        return [gzip.decompress(path.read_bytes()) for path in sorted(articles.glob("html/*.html.gz"))]
    from demo.articles import python_articles
    from demo.pages import Host, page_html

    host = Host("one.example", "The One", "A site of sorts", ("Home", "News", "Contact"), "main")
    return [page_html(host, title, text).encode() for title, text in python_articles().items()]


def measure(arguments: argparse.Namespace) -> str:
    """The tables, preceded by a line about the pages."""
    from benchmarks.loopback import web

    bodies = _bodies(arguments.articles)
    about = f"{len(bodies)} different pages of {sum(map(len, bodies)) / len(bodies) / 1000:.0f} kB on average"
    with web(bodies) as port:
        if arguments.memory:
            return f"{about}\n\n{_memory(port, arguments.memory, arguments.workers)}"
        fetching = _fetching(port, arguments.pages, arguments.rounds)
        return f"{about}\n\n{fetching}\n\n{_scraping(port, arguments.pages, arguments.rounds, arguments.workers)}"


# ------------------------------------------------------------------------------------------------ fetching


def _fetching(port: int, pages: int, rounds: int) -> str:
    """Measure every client in its own process; rounds are interleaved."""
    from benchmarks import clients
    from benchmarks.loopback import HOSTS, addresses

    def hosts(count: int) -> list[list[str]]:
        per_host = max(1, count // HOSTS)
        return [
            [f"http://{address}:{port}/page/{HOSTS * n + number}" for n in range(per_host)]
            for number, address in enumerate(addresses())
        ]

    every = {
        "requests, one after the other": (clients.requests_sequential, _SLOW),
        "requests, 32 threads": (clients.requests_threads, 1),
        f"{clients.HTTPX}, asyncio": (clients.httpx_tasks, _SLOW),
        "aiohttp, asyncio, bare": (clients.aiohttp_tasks, 1),
        "corpus.scrape's Fetcher, robots.txt not asked for": (clients.fetcher, 1),
        "corpus.scrape's Fetcher": (clients.fetcher_obeying, 1),
    }
    if clients.HTTPX is None:
        del every["None, asyncio"]
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in every}
    for _ in range(rounds):
        for name, (client, divisor) in every.items():
            work = hosts(pages // divisor)
            count = sum(map(len, work))
            seconds, cpu = alone(clients.timed, client, work)
            rates[name].append((count / seconds, cpu / count * 1000))
    medians = {name: [median(column) for column in zip(*found, strict=True)] for name, found in rates.items()}
    peer = medians["requests, 32 threads"][0]
    return table(
        [
            {
                "client": name,
                "pages/s": f"{rate:,.0f}",
                "against 32 threads": f"{rate / peer:.2f} x",
                "CPU ms per page": f"{cpu:.2f}",
            }
            for name, (rate, cpu) in medians.items()
        ]
    )


# ------------------------------------------------------------------------------------------------ whole scrapes


@dataclass(frozen=True)
class _Sample:
    """The state of a running scrape at one moment."""

    seconds: float
    pages: int
    """Pages finished so far."""
    fetch_cpu: float
    """CPU seconds of the fetching process."""
    extract_cpu: float
    """CPU seconds of the workers and their children."""
    idle: float
    """Idle seconds, summed over the cores of the machine."""
    fetch_bytes: int
    """Resident memory of the fetching process."""
    worker_bytes: int
    """Resident memory of the largest worker and its child; shared pages count twice."""
    all_bytes: int
    """Resident memory of all processes."""


@contextlib.contextmanager
def _scrape(port: int, pages: int, hosts: int, workers: int) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """Run the command that scrapes the server; yields the process and its journal."""
    import yaml

    from benchmarks.loopback import addresses

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        resolve = {f"site{number}.example": f"{address}:{port}" for number, address in enumerate(addresses(hosts))}
        config = {"run": name, "urls": ["-"], "scrape": {"resolve": resolve, "host_delay": 0}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "urls.txt").write_text("".join(f"http://site{n % hosts}.example/page/{n}\n" for n in range(pages)))
        options = {"--urls": "urls.txt", "--output": "pages.jsonl.zst", "--config": "config.yaml"}
        command = [sys.executable, "-m", "corpus.scrape", "--workers", str(workers)]
        command += [word for option, file in options.items() for word in (option, str(folder / file))]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                yield process, folder / "pages.jsonl.zst.journal"
            finally:
                process.kill()
        if process.returncode:
            raise RuntimeError(f"the scrape ended with exit code {process.returncode}")


def _samples(process: "subprocess.Popen[bytes]", journal: Path) -> Iterator[_Sample]:
    """Sample a scrape ten times per second until it ends."""
    import psutil

    parent = psutil.Process(process.pid)
    lines, offset = 0, 0
    while process.poll() is None:
        time.sleep(0.1)
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            with journal.open("rb") as file:
                file.seek(offset)
                new = file.read()
            lines, offset = lines + new.count(b"\n"), offset + len(new)
            families = [[worker, *worker.children()] for worker in parent.children()]
            cpu = [[member.cpu_times() for member in family] for family in families]
            memory = [sum(member.memory_info().rss for member in family) for family in families]
            own, machine = parent.memory_info().rss, psutil.cpu_times()
            yield _Sample(
                seconds=time.monotonic(),
                pages=lines - 1,  # the first line is a header
                fetch_cpu=sum(parent.cpu_times()[:2]),
                # of a worker, also the time of its finished children
                extract_cpu=sum(sum(family[0][:4]) + sum(sum(child[:2]) for child in family[1:]) for family in cpu),
                idle=machine.idle + machine.iowait,
                fetch_bytes=own,
                worker_bytes=max(memory, default=0),
                all_bytes=own + sum(memory),
            )


def _scraping(port: int, pages: int, rounds: int, workers: int) -> str:
    """Whole scrapes, from 10 % to 90 % of the pages: without the start of the workers and the end."""
    from benchmarks.loopback import HOSTS
    from common.workers import available_cpus

    found = []
    for _ in range(rounds):
        with _scrape(port, pages, HOSTS, workers) as (process, journal):
            samples = [
                sample for sample in _samples(process, journal) if pages // 10 <= sample.pages <= pages * 9 // 10
            ]
        first, last = samples[0], samples[-1]
        count, seconds = last.pages - first.pages, last.seconds - first.seconds
        fetching, extracting = last.fetch_cpu - first.fetch_cpu, last.extract_cpu - first.extract_cpu
        remaining = (
            extracting + last.idle - first.idle
        )  # CPU time that neither fetching, nor the server, nor other processes used
        found.append((count / seconds, fetching / count * 1000, extracting / count * 1000, extracting / remaining))
    rate, fetching, extracting, share = (median(column) for column in zip(*found, strict=True))
    return table(
        [
            {
                "whole scrape": f"{workers} workers, {available_cpus()} cores",
                "pages/s": f"{rate:,.0f}",
                "fetching, CPU ms per page": f"{fetching:.2f}",
                "extracting, CPU ms per page": f"{extracting:.2f}",
                "extracting, of the remaining CPU": f"{share:.0%}",
            }
        ]
    )


_BYTES = {
    "fetch_bytes": "fetching process",
    "worker_bytes": "largest worker with its child",
    "all_bytes": "all processes",
}


def _memory(port: int, pages: int, workers: int) -> str:
    """Memory during one scrape of four pages per host: after a quarter of the pages, and near the end."""
    with _scrape(port, pages, pages // 4, workers) as (process, journal):
        samples = [sample for sample in _samples(process, journal) if sample.worker_bytes]
    quarter = next(sample for sample in samples if sample.pages >= pages // 4)
    last = max(samples, key=lambda sample: sample.pages)
    peak = replace(last, **{key: max(getattr(sample, key) for sample in samples) for key in _BYTES})
    rows = {f"{quarter.pages:,} pages": quarter, f"{last.pages:,} pages": last, "(peak)": peak}
    return table(
        [
            {"RSS in MB after": name} | {title: f"{getattr(sample, key) / 1e6:.0f}" for key, title in _BYTES.items()}
            for name, sample in rows.items()
        ]
    )
