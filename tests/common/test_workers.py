import os
import signal
import threading
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


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_threads_give_results_in_the_order_of_the_items_and_read_a_little_ahead(workers: int) -> None:
    items = count()
    results = threaded_map(square, items, workers)
    assert [next(results) for _ in range(100)] == [number * number for number in range(100)]
    assert next(items) <= 100 + 4 * workers
    results.close()


def test_the_calling_thread_is_one_of_the_workers() -> None:
    names = set(threaded_map(lambda _: threading.current_thread().name, range(100), 2))
    assert len(names) == 1 and threading.current_thread().name not in names, "one beside the caller's"


def test_an_error_in_a_thread_ends_the_step_as_it_is() -> None:
    def fail(number: int) -> int:
        raise ToolkitError(f"item {number}")

    with pytest.raises(ToolkitError, match="item 0"):
        list(threaded_map(fail, range(10), 2))


def test_batches_hold_every_item_once() -> None:
    assert list(batched(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
