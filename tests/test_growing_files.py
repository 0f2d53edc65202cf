"""A power cut leaves any tail in a file that grows: nothing, zeros, noise, the beginning of a
record. Work goes on.

Each kind of file is written, cut at an offset and given a tail; then what the file is for goes on
as after a restart, and must end with the content of an undisturbed run.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.utils.tensorboard import SummaryWriter

from cluster.corpus_jobs.run_batch import Runner, read_events
from common.files import kind_of, read_rows
from corpus.scrape.archive import Archive, read_pages
from corpus.scrape.journal import Journal
from corpus.scrape.response import FetchedPage
from tests.helpers import new_seed
from training.metrics.curves import VALID_COLUMNS, Curve
from training.monitoring.heartbeat import Heartbeat, progress_of, read_heartbeats
from workflow.report.models import read_curve

URLS = [f"http://one.example/{n}" for n in range(3)]
BODY = random.Random(0).randbytes(100).hex().encode()


@dataclass(frozen=True)
class Kind:
    """A kind of file that grows."""

    name: str
    """Of the file."""
    go_on: Callable[[Path], object]
    """Do, or go on with, the work that makes the file grow; returns what must be equal to an
    undisturbed run.
    """
    begin: bytes
    """The beginning of a record."""
    durable: Callable[[bytes], int] = lambda _: 0
    """How many bytes are on the disk, and so survive, whatever happens."""


def scrape(path: Path) -> object:
    """Append the pages that an archive lacks. Pages are compared: each record has a date and an id
    of its own.
    """
    with Archive(path) as archive:
        for url in URLS:
            if url not in archive.responses:
                archive.append(FetchedPage(url, 200, "OK", (("Content-Type", "text/html"),), "text/html", BODY, BODY))
    pages = {url: page for url, page in read_pages(path, 1 << 20) if isinstance(page, FetchedPage)}
    return list(pages), [page.body for page in pages.values()]


def journal(path: Path) -> object:
    """Append the outcomes that a journal lacks."""
    with Journal(path.with_suffix(""), {"max_bytes": 100}) as opened:
        for url in URLS:
            if url not in opened.known:
                opened.append(url, reason="http_404", host_failed=True)
    return path.read_bytes()


def train(path: Path) -> object:
    """Write the rows after a checkpoint at iteration 20, of which the earlier ones were synced."""
    done = 20 if path.exists() else 0
    curve = Curve(path, VALID_COLUMNS, done)
    for iteration in range(done + 10, 60, 10):
        curve.append({"iteration": iteration, "consumed_samples": 8 * iteration, "loss": 1 / iteration})
        if iteration == 20:
            curve.sync()
    assert len(read_curve(path)) == len(read_rows(path))
    return path.read_bytes()


def batch(path: Path) -> object:
    """Record the events that a task's results lack; one that was complete but for its line end may
    be there twice.
    """
    runner = Runner(str(path.parent), 0, "7", 0)
    for number in range(3):
        for event in ({"start": number, "time": 1.5}, {"end": number, "exit": number, "seconds": 0.25}):
            if not path.exists() or event not in read_events(str(path))[0]:
                runner.record(**event)
    events = read_events(str(path))[0]
    return [event for at, event in enumerate(events) if event not in events[:at]]


def beat(path: Path) -> object:
    """Read the heartbeats of a job that was requeued, and write a new one, which replaces the
    old.
    """
    model = path.parents[2]
    assert len(read_heartbeats(path.parent)) <= 1 and len(progress_of(model)) in (0, 8)
    with Heartbeat(model, 0, 0, path.parent.name) as heartbeat:
        heartbeat.report({"done": 3, "seconds_left": 4})
        path.with_suffix(".stacks").write_text("so that the files stay")
        return {**progress_of(model), "time": 0}


def points(path: Path) -> Iterator[int]:
    for file in sorted(path.parent.glob("events.*")):
        yield from (event.step for event in EventFileLoader(str(file)).Load() if event.HasField("summary"))


def tensorboard(path: Path) -> object:
    """Show the points after a checkpoint at iteration 2, each start in its own file; TensorBoard
    reads them all.
    """
    done = 2 if path.exists() else 0
    writer = SummaryWriter(path.parent)
    for step in range(done + 1, 6):
        writer.add_scalar("loss", step, step)
    writer.close()
    if not done:
        next(path.parent.glob("events.*")).rename(path)
    return list(points(path))[-3:]


def second_row(whole: bytes) -> int:
    return whole.index(b"\n30,") + 1


MEMBER = b"\x1f\x8b\x08\0\0\0\0\0\x02\x03"
KINDS = [
    Kind("x.warc.gz", scrape, MEMBER),
    Kind("x.journal", journal, b'{"url":"http://one.example/2","sett'),
    Kind("valid.csv", train, b"40,3", second_row),
    Kind("0.results", batch, b'{"end": 1, "ex'),
    Kind("heartbeat/7/rank_00000.json", beat, b'{"rank": 0, '),
    Kind("tensorboard/events.out.tfevents.1.host.1.1", tensorboard, b"\x18\0\0\0\0\0\0\0"),
]


def noise(rng: random.Random, before: bytes) -> bytes:
    """Random bytes with which a file does not happen to begin like one of another kind."""
    while kind_of(before + (drawn := rng.randbytes(300)))[0] not in ("", ".gz-compressed"):
        pass
    return drawn


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.rpartition("/")[2])
def test_whatever_a_power_cut_leaves_behind_any_byte_work_goes_on(kind: Kind, step: int, tmp_path: Path) -> None:
    rng = random.Random(new_seed())
    path = tmp_path / kind.name
    path.parent.mkdir(parents=True, exist_ok=True)
    expected = kind.go_on(path)
    whole = path.read_bytes()
    for cut in range(kind.durable(whole) + rng.randrange(step), len(whole) + 1, step):
        for tail in (b"", bytes(512), bytes(4096), noise(rng, whole[:cut]), kind.begin, whole[:50]):
            for other in path.parent.iterdir():
                other.unlink()
            path.write_bytes(whole[:cut] + tail)
            assert kind.go_on(path) == expected, (cut, tail)
            assert kind.go_on(path) == expected, (cut, tail, "and again")
