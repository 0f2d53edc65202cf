"""Which tasks have left Slurm: late results, jobs of other users, a squeue that takes its time."""

import json
import os
import threading
from pathlib import Path

import pytest

from cluster.corpus_jobs import queue
from cluster.corpus_jobs.batches import Request, Shard, Task, accepted, write_batch
from cluster.corpus_jobs.queue import Queue, hidden
from cluster.slurm import QueuedJob
from common.settings import SiteSettings
from tests.cluster.fake_slurm import FakeSlurm
from tests.helpers import wait_for


@pytest.fixture
def tasks(tmp_path: Path) -> list[Task]:
    """A batch of two tasks that Slurm has accepted as 77."""
    shards = [Shard(f"key{number}", f"{number:04d}", "clean", "true", "/bin/bash", 1, []) for number in range(2)]
    made = write_batch(tmp_path, shards, [range(1), range(1, 2)], Request(1, 1, 1), SiteSettings())
    accepted(made, "77")
    return made


def note(task: Task, **event: object) -> None:
    with open(task.folder / f"{task.index}.results", "a") as file:
        file.write(json.dumps(event) + "\n")
    task.read()


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", ""])
def test_results_may_be_as_late_as_latency_wait_says(
    tasks: list[Task], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    now = 1000.0
    monkeypatch.setattr(queue.time, "monotonic", lambda: now)
    watched, ended = Queue(20, 60), QueuedJob("77_0", "", state, "", "") if state else None
    assert not watched.has_left(tasks[0], ended)
    now += 59
    assert not watched.has_left(tasks[0], ended)
    now += 1
    assert watched.has_left(tasks[0], ended)
    assert not watched.has_left(tasks[0], QueuedJob("77_0", "", "PENDING", "", "")), "requeued"
    assert not watched.has_left(tasks[0], ended)


def test_nobody_waits_for_a_squeue_that_takes_its_time(tasks: list[Task], fake: FakeSlurm) -> None:
    answers = threading.Event()
    fake.behave(meanwhile=lambda _: answers.wait())
    watched = Queue(0, 60)
    assert watched.poll({tasks[0]}) is None and watched.poll({*tasks}) is None
    answers.set()
    seen = []
    wait_for(lambda: seen.append(watched.poll({*tasks})) or seen[-1])
    asked, found = seen[-1]
    assert asked == {tasks[0]}, "the answer says nothing about a task that was submitted since"
    assert found == [] and len(fake.calls("squeue")) == 1


def test_a_job_of_another_user_that_slurm_hides_counts_as_alive_until_it_says_that_it_left(
    tasks: list[Task], fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.config = "PrivateData             = jobs,usage\n"
    note(tasks[0], begin=0, job="77_0")
    assert hidden(tasks, []) == [] and fake.calls() == [], "Slurm shows us our own"
    monkeypatch.setattr(os, "getuid", lambda: tasks[0].folder.stat().st_uid + 1)
    assert hidden(tasks, ["77_0", "77_1"]) == []
    assert hidden(tasks, []) == [tasks[0]]
    assert [task.abandoned for task in tasks] == [False, True], "what still waits will run nothing"
    note(tasks[0], left=0)
    note(tasks[0], begin=1, job="77_0")
    note(tasks[0], left=0)
    assert hidden(tasks, []) == [tasks[0]], "it was requeued, and an older copy left late"
    note(tasks[0], left=1)
    assert hidden(tasks, []) == []
    note(tasks[1], begin=0, job="77_1")
    assert hidden(tasks, []) == [tasks[1]]
    fake.config = "PrivateData             = none\n"
    assert hidden(tasks, []) == [], "what Slurm does not show has ended"
