import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count

import pytest

from common.errors import ToolkitError
from common.workers import batched, ordered_map, threaded_map


def square(number: int) -> int:
    return number * number


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    assert list(ordered_map(square, range(100), workers)) == [number * number for number in range(100)]


def test_a_worker_that_is_killed_ends_the_step_with_a_message() -> None:
    with pytest.raises(ToolkitError, match="worker process died"):
        list(ordered_map(die_at_three, range(10), 2))


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
            if max(asked) == 24:  # four more than those taken, and one at work
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
