"""Parallel maps over processes or threads, in the order of the input whatever the worker count.

    with Workers(2) as pool:  # one pool for a whole command
        for count in pool.map(count_words, batched(documents, 32)): ...

Processes are forked after the calling process has done the first item, so they share what it loaded
(language profiles, n-grams, libraries). A single item starts none.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from queue import SimpleQueue
from typing import TypeVar

from common.child_process import WorkerProcess

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cpus() -> int:
    """Number of CPUs that this process may use, by Slurm or taskset."""
    return len(os.sched_getaffinity(0))


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` consecutive items; the last one may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


class Workers:
    """A pool of `count` worker processes; with one, `map` runs in the calling process.

    They end with this process, even if it is killed. Start them in the main thread, before others.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[WorkerProcess] = []
        self._idle: SimpleQueue[WorkerProcess] = SimpleQueue()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="worker")  # one per process

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is not None:
            for process in self._processes:
                process.end()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.finish()
        for process in self._processes:
            process.join()

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """`map(function, items)` with at most 4 items per worker in flight.

        The first map of a pool does the first item in this process before it returns, and starts
        the worker processes if there is a second item. Call it before opening outputs and progress
        bars, which hold locks and start threads. Raises ToolkitError if a worker dies (killed, out
        of memory).
        """
        if self.count <= 1:
            return map(function, items)
        done: list[Result] = []
        following = iter(items)
        if not self._processes:
            done = [function(item) for item in islice(following, 1)]
            if not (second := list(islice(following, 1))):
                return iter(done)
            self.start()
            following = chain(second, following)
        return chain(done, _in_order(partial(self.submit, function), following, 4 * self.count))

    def submit(self, function: Callable[[Item], Result], item: Item) -> "Future[Result]":
        """Submit `function(item)` to a worker process; call `start` first."""
        return self._threads.submit(self._call, function, item)

    def start(self) -> None:
        """Start the worker processes, as `map` does."""
        for _ in range(self.count):
            process = WorkerProcess()
            self._processes.append(process)
            self._idle.put(process)

    def _call(self, function: Callable[[Item], Result], item: Item) -> Result:
        process = self._idle.get()
        try:
            result: Result = process.call(function, item)
        finally:
            self._idle.put(process)
        return result


def threaded_map(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int, in_flight: int | None = None
) -> Generator[Result, None, None]:
    """`map(function, items)` on `threads` threads, or without (0), if `function` releases the GIL.

    Computes up to `in_flight` items (default 4 per thread) in advance. Close it to stop the
    threads.
    """
    if threads < 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="worker") as pool:
        yield from _in_order(lambda item: pool.submit(function, item), items, in_flight or 4 * threads)


def _in_order(
    submit: Callable[[Item], "Future[Result]"], items: Iterable[Item], in_flight: int
) -> Generator[Result, None, None]:
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(submit(item))
            if len(pending) >= in_flight:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
