"""Work spread over processes or threads, results in input order, so that the worker count changes no byte."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TypeVar

from common.errors import ToolkitError

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cpus() -> int:
    """CPUs this process may use: what Slurm or taskset granted, not what the node has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` items in order, the last one shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map(function, items)` over `workers` processes, lazily, at most 4 items a worker in flight.

    One worker runs in this process. Raises ToolkitError when a worker dies (out of memory, killed).
    """
    if workers <= 1:
        yield from map(function, items)
        return
    # spawn: a forked child could inherit locks held by another thread (progress bar, event loop)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield from _in_order(pool, function, items, 4 * workers)
        except BrokenProcessPool:
            raise ToolkitError("a worker process died (out of memory?); try fewer --workers") from None


def threaded_map(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int, in_flight: int | None = None
) -> Generator[Result, None, None]:
    """`map(function, items)` by threads beside the calling one, for a function that lets other threads run.

    `in_flight` items (4 a thread) are at work before they are asked for; 0 threads: the calling one does it. An error
    is raised where its result is due. Close the iterator to stop the threads.
    """
    if threads < 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="worker") as pool:
        yield from _in_order(pool, function, items, in_flight or 4 * threads)


def _in_order(
    pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], in_flight: int
) -> Iterator[Result]:
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= in_flight:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
