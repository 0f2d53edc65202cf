"""Processes of a job meet without a guessed port, and learn of each other's end."""

import socket
import threading
from pathlib import Path

import pytest

from common.errors import JobError
from tests.helpers import PATIENCE
from training.launch.rank import Launch
from training.launch.rendezvous import rendezvous


def two_ranks() -> list[Launch]:
    return [Launch("submitit", rank, 2, rank, 2, 1, "local-1") for rank in range(2)]


def test_processes_meet_and_leave_no_file_even_after_a_killed_start(tmp_path: Path) -> None:
    with socket.socket() as unused:  # bound but not listening: whoever connects is refused
        unused.bind(("127.0.0.1", 0))
        stale = tmp_path / "meeting-local-1"
        stale.write_text(f"127.0.0.1:{unused.getsockname()[1]}\n")
        stores = {}

        def come(launch: Launch) -> None:
            stores[launch.rank] = rendezvous(launch, tmp_path, timeout=PATIENCE)

        late = [threading.Timer(delay, come, [launch]) for launch, delay in zip(two_ranks(), (0.5, 0), strict=True)]
        for thread in late:
            thread.start()
        for thread in late:
            thread.join()
        stores[1].set("greeting", "hello")
        assert stores[0].get("greeting") == b"hello"
        assert not list(tmp_path.iterdir())


def test_a_process_that_waits_for_nobody_raises_job_error(tmp_path: Path) -> None:
    for launch, says in zip(two_ranks(), ("rank 0 .* rank 1", "rank 1"), strict=True):
        with pytest.raises(JobError, match=says):
            rendezvous(launch, tmp_path, timeout=1)
        assert not list(tmp_path.iterdir())
