"""Child processes that end with their parent, even when the parent is killed with SIGKILL.

    die_with_parent(os.getppid())             # in a child: Linux kills it when its parent ends
    worker = WorkerProcess()
    worker.call(len, "abc")                   # 3

A terminal and Slurm signal the whole process group. Workers therefore ignore SIGINT, SIGTERM and
SIGHUP; the command stops them with `end`, which lets them remove their temporary files.
"""

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from common.errors import ToolkitError

_LIBC = ctypes.CDLL(None)  # loaded now: between fork and exec it is too late
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_HANDLED_BY_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END = signal.SIGUSR1  # sent by the parent: abort the current item, clean up, exit
_GRACE = 5.0  # seconds that a worker has to clean up


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent ends.

    The kernel watches the thread that started this process, so that thread must outlive the work.
    If the parent's process id is not `parent`, the parent has ended, and this process kills itself.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class WorkerProcess:
    """A forked process that calls functions, one at a time. Not thread-safe.

    Start it in the main thread, before any other thread, because fork copies their locks.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._function: object = None  # that the worker has
        self._process = context.Process(target=_work, args=(theirs, os.getpid()), daemon=True)
        with theirs, _signals_blocked(), warnings.catch_warnings():
            # Python also counts native threads, such as idle BLAS pools; no worker uses them
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            self._process.start()

    def call(self, function: Callable[[Any], Any], item: object) -> Any:
        """Return `function(item)`, or raise its exception; ToolkitError if the process dies.

        A function is sent only if it is another object than in the last call.
        """
        try:
            self._connection.send((None if function is self._function else function, item))
            self._function = function
            succeeded, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(_GRACE)
            code = self._process.exitcode or 0
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            raise ToolkitError(f"a worker process died: {cause}{memory}; try fewer --workers") from None
        if succeeded:
            return answer
        if isinstance(answer, MemoryError):
            raise ToolkitError("a worker process ran out of memory; try fewer --workers") from answer
        raise answer

    def finish(self) -> None:
        """Stop the idle process."""
        with suppress(OSError):
            self._connection.send(None)

    def end(self) -> None:
        """Abort the work and stop the process; `join` waits for its exit."""
        if self._process.is_alive() and self._process.pid:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, _END)

    def join(self) -> None:
        """Wait until the process has exited; kill it after five seconds."""
        self._process.join(_GRACE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


def _kill_forgotten() -> None:
    """At exit, kill workers orphaned by a signal at their start, else multiprocessing waits."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


atexit.register(_kill_forgotten)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals: a child keeps its parent's handlers until it has set its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_HANDLED_BY_PARENT, _END})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------------------------- in the worker


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit()  # SystemExit, which `except Exception` in a step lets through


def _work(connection: Connection, parent: int) -> None:
    """Answer calls until `finish`; each answer is (True, result) or (False, exception)."""
    for number in _HANDLED_BY_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(_END, _end)
    signal.set_wakeup_fd(-1)  # an event loop's, of the process that forked this one
    die_with_parent(parent)
    gc.freeze()  # keeps objects loaded before the fork in pages shared with the parent
    function: Callable[[Any], Any] | None = None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_HANDLED_BY_PARENT, _END})
        while (message := connection.recv()) is not None:
            function = message[0] or function
            assert function is not None
            answer = _answer(function, message[1])
            try:
                connection.send(answer)
            except BrokenPipeError:
                return
            except Exception as error:  # the answer cannot be pickled; nothing was sent
                connection.send((False, TypeError(f"the answer of {function} cannot be sent: {error}")))
    except (SystemExit, EOFError):
        return


def _answer(function: Callable[[Any], Any], item: object) -> tuple[bool, object]:
    try:
        return True, function(item)
    except SystemExit:
        raise
    except BaseException as error:
        error.add_note(f"in a worker process:\n{traceback.format_exc()}")
        return False, error
