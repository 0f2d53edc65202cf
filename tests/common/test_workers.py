import os
import signal

import pytest

from common.errors import ToolkitError
from common.workers import batched, ordered_map


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


def test_batches_hold_every_item_once() -> None:
    assert list(batched(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
