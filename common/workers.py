"""Parallel maps over processes or threads. Results keep the input's order, so the worker count never changes a byte.

    with Workers(2) as pool: ...              # one pool for a whole command: pool.map

Processes are forked after the calling process has done the first item, so they share what it loaded (language profiles,
n-grams, libraries), start in milliseconds, and are not started at all for a single item. They end with their parent,
whatever ends it. Signals reach a command with its whole process group (a terminal, Slurm); workers ignore them, and the
command ends its workers.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, TypeVar

from common.errors import ToolkitError

Item = TypeVar("Item")
Result = TypeVar("Result")

_LIBC = ctypes.CDLL(None)  # loaded now: between fork and exec it is too late
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LEFT_TO_COMMAND = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_function: Callable[[Any], Any]
"""In a worker process: what it computes of each item."""


def available_cpus() -> int:
    """Number of CPUs that this process may use: those that Slurm or taskset granted, not all of the node."""
    return len(os.sched_getaffinity(0))


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` consecutive items; the last one may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent ends.

    The kernel watches the thread that started this process, so that thread must live as long as the work. If `parent`
    is given and is not the parent's process id any more, this process kills itself.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class _Process(ForkProcess):
    """A worker. The executor terminates the others when one has died, but they ignore SIGTERM."""

    def terminate(self) -> None:
        """Kill it."""
        self.kill()


class _Context(ForkContext):
    Process = _Process


class Workers:
    """A pool of `count` worker processes for a whole command; with one, everything runs in the calling process.

    Every map forks its processes, so begin it in the main thread, and before starting others: progress bars have some.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._is_warm = count <= 1
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is not None:
            for process in multiprocessing.active_children():
                process.kill()
            if self._pool is not None:  # Python 3.11 waits forever for the thread that writes to them (gh-94777)
                self._pool._call_queue._reader.close()  # type: ignore[attr-defined]
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """`map(function, items)` with at most 4 items per worker in flight; an error is raised in place of its result.

        The first map of a pool does the first item in this process, and forks only if there is a second one. Exhaust
        the results of one map before the next. Raises ToolkitError when a worker dies (out of memory, killed).
        """
        if self.count <= 1:
            return map(function, items)
        following, done = iter(items), list[Result]()
        if not self._is_warm:
            done = [function(item) for item in islice(following, 1)]
            second = list(islice(following, 1))
            if not second:
                return iter(done)
            following = chain(second, following)
        self.start(function)
        return chain(done, _in_order(self.submit, following, 4 * self.count))

    def start(self, function: Callable[[Any], Any]) -> None:
        """Fork the processes, which compute `function` of each item that is submitted; `map` does it itself."""
        if self._pool is not None:
            self._pool.shutdown()
        self._is_warm = True
        self._pool = ProcessPoolExecutor(self.count, _Context(), _begin, (function, os.getpid()))
        # a signal's exception between two forks would leave the executor without the thread that ends it
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_COMMAND)
        try:
            with warnings.catch_warnings():
                # Python also counts native threads, such as BLAS pools; they are idle, and no worker uses them.
                warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
                self._pool.submit(int)  # the executor forks all at the first item
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def submit(self, item: Any) -> "Future[Any]":
        """The result for an item; `start` the pool before."""
        assert self._pool is not None
        return self._pool.submit(_compute, item)


@contextmanager
def process_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Iterator[Result]]:
    """The results of `Workers(workers).map(function, items)`, for a command with a single map."""
    with Workers(workers) as pool:
        yield pool.map(function, items)


@contextmanager
def worker_errors() -> Iterator[None]:
    """Say in one line that a worker died, where results are taken. Raises ToolkitError."""
    try:
        yield
    except BrokenProcessPool:
        raise ToolkitError("a worker process was killed (out of memory?); try fewer --workers") from None


def _begin(function: Callable[[Any], Any], parent: int) -> None:
    """Prepare a worker process."""
    die_with_parent(parent)
    signal.set_wakeup_fd(-1)  # an event loop's, of the process that forked this one
    for number in _LEFT_TO_COMMAND:
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # keeps objects loaded before the fork in pages shared with the parent
    global _function
    _function = function


def _compute(item: Any) -> Any:
    try:
        return _function(item)
    except MemoryError:
        raise ToolkitError("a worker process ran out of memory; try fewer --workers") from None


def threaded_map(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int, in_flight: int | None = None
) -> Generator[Result, None, None]:
    """`map(function, items)` on `threads` additional threads, for a function that releases the GIL.

    Up to `in_flight` items (default 4 per thread) are computed ahead; with 0 threads the caller computes them. An
    error is raised in place of its result. Close the iterator to stop the threads.
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
        with worker_errors():
            for item in items:
                pending.append(submit(item))
                if len(pending) >= in_flight:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
