import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import count

import pytest

from common.errors import InputError, ToolkitError
from common.workers import Workers, threaded_map
from tests.helpers import PATIENCE, wait_for


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


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_order_and_an_item_that_cannot_be_read_is_an_error(workers: int) -> None:
    def numbers() -> Iterator[int]:
        yield from range(100)
        raise InputError("the last is damaged")

    found = []
    with pytest.raises(InputError, match="damaged"), Workers(workers) as pool:
        for result in pool.map(square, numbers()):
            found.append(result)
    assert found == [number * number for number in range(len(found))] and len(found) >= 80


def test_a_pool_forks_after_the_first_item_and_its_processes_leave_signals_to_the_command() -> None:
    with Workers(2) as pool:
        assert list(pool.map(process_of, [1])) == [os.getpid()], "one item needs no process"
        assert not multiprocessing.active_children()
        first, *others = pool.map(process_of, range(20))
        assert first == os.getpid(), "what it loads is there for all"
        assert set(others) <= {child.pid for child in multiprocessing.active_children()}
        for child in multiprocessing.active_children():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(child.pid or 0, number)  # signals are left to the command
        assert list(pool.map(square, [3, 4])) == [9, 16], "another function"
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_or_has_no_memory_ends_the_step_with_a_message() -> None:
    for function, said in ((die_at_three, "SIGKILL.*--workers"), (out_of_memory, "memory.*--workers")):
        with pytest.raises(ToolkitError, match=said), Workers(2) as pool:
            list(pool.map(function, range(10)))
        assert not multiprocessing.active_children()


def test_threads_give_results_in_order_and_make_a_bounded_number_ahead_of_their_use() -> None:
    asked: list[int] = []
    gate = threading.Event()

    def slow(number: int) -> int:
        asked.append(number)
        if number == 0:
            gate.wait(PATIENCE)  # the others overtake it
        return number

    with closing(threaded_map(slow, count(), threads=2, in_flight=5)) as results:
        threading.Thread(target=lambda: (wait_for(lambda: len(asked) == 5), gate.set())).start()
        assert [next(results) for _ in range(21)] == list(range(21))
        wait_for(lambda: max(asked) == 24)  # four more than the results taken
    assert max(asked) == 24
    assert list(threaded_map(str, range(7), 3)) == list(threaded_map(str, range(7), 0)) == list("0123456")
