import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

import pytest

from common.child_process import fork_or_spawn
from common.errors import InputError, ToolkitError
from common.files import atomic_path
from common.workers import Workers, batched, process_map, threaded_map


def square(number: int) -> int:
    return number * number


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def process_of(_item: object) -> int:
    return os.getpid()


def out_of_memory(number: int) -> int:
    if number:
        raise MemoryError
    return number


def wait_for(path: Path) -> None:
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.01)
    raise TimeoutError(path)


def write_slowly(path: Path) -> None:
    with atomic_path(path):
        path.with_suffix(".started").touch()
        time.sleep(600)


@pytest.fixture(params=["fork", "spawn"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both start methods, whatever threads the test process has."""
    context = multiprocessing.get_context(request.param)
    monkeypatch.setattr("common.workers.fork_or_spawn", lambda: context)
    return str(request.param)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    with process_map(square, range(100), workers) as results:
        assert list(results) == [number * number for number in range(100)]


def test_all_that_a_pool_does_is_done_by_the_same_processes(method: str) -> None:
    with Workers(2) as pool:
        first, *others = pool.map(process_of, range(20))
        assert first == os.getpid(), "what it loads is there for all"
        assert len(set(others)) == 2 and first not in others
        assert set(pool.map(process_of, range(20))) == set(others)
        groups = list(map(list, pool.map_groups(process_of, [range(9), [], range(9)])))
        assert [len(group) for group in groups] == [9, 0, 9] and set(groups[0] + groups[2]) == set(others)
        assert list(pool.map(square, [3, 4])) == [9, 16], "another function"
    assert not multiprocessing.active_children()


def test_one_item_needs_no_process() -> None:
    with Workers(2) as pool:
        assert list(pool.map(process_of, [1])) == list(pool.map(process_of, [1])) == [os.getpid()]
        assert list(pool.map(process_of, [])) == [] and not multiprocessing.active_children()


def test_workers_are_forked_unless_the_process_has_threads() -> None:
    gate = threading.Event()
    others = threading.active_count() > 1  # those of pytest-xdist, for example
    assert fork_or_spawn().get_start_method() == ("spawn" if others or sys.platform != "linux" else "fork")
    threading.Thread(target=gate.wait).start()
    assert fork_or_spawn().get_start_method() == "spawn"
    gate.set()


@pytest.mark.parametrize("workers", [1, 2])
def test_an_item_that_cannot_be_read_is_an_error_after_the_results_before_it(workers: int) -> None:
    def numbers() -> Iterator[int]:
        yield from range(5)
        raise InputError("the sixth is damaged")

    found = []
    with pytest.raises(InputError, match="sixth"), process_map(square, numbers(), workers) as results:
        for result in results:
            found.append(result)
    assert found == [0, 1, 4, 9, 16]


def test_a_worker_that_is_killed_ends_the_step_with_a_message(method: str) -> None:
    with pytest.raises(ToolkitError, match=r"worker process died: SIGKILL \(out of memory\?\); try fewer --workers"):
        with process_map(die_at_three, range(10), 2) as results:
            list(results)
    assert not multiprocessing.active_children()


def test_a_worker_without_memory_ends_the_step_with_a_message() -> None:
    with pytest.raises(ToolkitError, match="ran out of memory; try fewer --workers"):
        with process_map(out_of_memory, range(10), 2) as results:
            list(results)


def test_workers_that_cannot_be_started_are_an_error_that_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_context: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("common.workers.WorkerProcess", refuse)
    with pytest.raises(ToolkitError, match=r"only 0 of 3 worker processes .* try fewer --workers"):
        with process_map(square, range(10), 3) as results:
            list(results)


def test_an_answer_that_cannot_be_sent_is_an_error_of_that_item() -> None:
    with pytest.raises(TypeError, match="cannot be sent"), process_map(locked, range(10), 2) as results:
        list(results)


def locked(number: int) -> object:
    return threading.Lock() if number else number


def test_workers_of_a_command_that_fails_remove_their_temporary_files(tmp_path: Path, method: str) -> None:
    def work(pool: Workers) -> None:
        with suppress(ToolkitError):  # the processes died
            list(pool.map(write_slowly, [tmp_path / "a", tmp_path / "b"]))

    with pytest.raises(InputError, match="stop"), Workers(2) as pool:
        list(pool.map(square, range(3)))
        threading.Thread(target=work, args=(pool,)).start()
        for name in "ab":
            wait_for(tmp_path / f"{name}.started")
        raise InputError("stop")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.started", "b.started"]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGHUP)])
def test_workers_leave_signals_to_their_command(signals: tuple[signal.Signals, ...]) -> None:
    with Workers(2) as pool:
        list(pool.map(square, range(3)))
        for child in multiprocessing.active_children():
            for number in signals:
                os.kill(child.pid or 0, number)
        assert list(pool.map(square, range(3))) == [0, 1, 4]


def test_a_worker_that_a_signal_leaves_without_an_owner_ends_with_its_command() -> None:
    code = "from common.child_process import *; WorkerProcess(fork_or_spawn()).call(len, ''); raise SystemExit(143)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 143


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_threads_give_results_in_the_order_of_the_items_and_read_a_little_ahead(threads: int) -> None:
    items = count()
    results = threaded_map(square, items, threads)
    assert [next(results) for _ in range(100)] == [number * number for number in range(100)]
    assert next(items) <= 100 + 4 * threads
    results.close()


def test_threads_work_beside_the_calling_one() -> None:
    names = set(threaded_map(lambda _: threading.current_thread().name, range(100), 1))
    assert len(names) == 1 and threading.current_thread().name not in names
    assert set(threaded_map(lambda _: threading.current_thread().name, range(9), 0)) == {
        threading.current_thread().name
    }


def test_batches_hold_every_item_once() -> None:
    assert list(batched(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_results_come_in_order_and_are_made_ahead_of_their_use() -> None:
    asked: list[int] = []
    gate = threading.Event()

    def slow(number: int) -> int:
        asked.append(number)
        if number == 0:
            gate.wait(60)  # the others overtake it
        return number

    with closing(threaded_map(slow, count(), threads=2, in_flight=5)) as results:
        threading.Thread(target=lambda: (time.sleep(0.05), gate.set())).start()
        assert next(results) == 0
        assert [next(results) for _ in range(20)] == list(range(1, 21))
        for _ in range(6000):
            if max(asked) == 24:  # four more than the results taken, and one in progress
                break
            time.sleep(0.01)
    assert max(asked) == 24
    assert list(threaded_map(str, range(7), threads=3, in_flight=9)) == list("0123456")


def test_an_error_is_raised_where_its_result_is_due_and_the_threads_end() -> None:
    def fails(number: int) -> int:
        return 1 // (3 - number)

    results = threaded_map(fails, count(), threads=2, in_flight=4)
    assert [next(results) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker")]


def test_an_iterator_that_is_closed_stops_its_threads() -> None:
    def numbers() -> Iterator[int]:
        yield from range(10)

    results = threaded_map(str, numbers(), threads=3, in_flight=4)
    next(results)
    results.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker")]
