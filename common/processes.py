"""Worker processes that end with the process that started them, also when that one is killed with SIGKILL.

    die_with_parent(os.getppid())             # in any child: Linux ends it with its parent
    worker = WorkerProcess(fork_or_spawn())
    worker.call(len, "abc")                   # 3

A command is ended by signals to it alone or to its whole process group (a terminal, Slurm). Workers leave both to the
command: they ignore SIGINT, SIGTERM and SIGHUP, and the command ends them by `end`, which lets them remove their
temporary files.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from types import FrameType
from typing import Any

from common.errors import ToolkitError

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # opened here: between fork and exec it is too late
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_OF_THE_COMMAND = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END = signal.SIGUSR1  # from the command: drop the item in hand, clean up, leave
_PATIENCE = 5.0  # seconds that a worker gets to clean up


def die_with_parent(parent: int | None = None) -> bool:
    """Have the kernel kill this process when the one that started it ends; False where it cannot (not Linux).

    The kernel watches the thread that started this process, so that thread must live as long as the work. `parent` is
    the process id that the caller expects: when it is gone already, this process ends at once.
    """
    if _LIBC is None or _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        return False
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def fork_or_spawn() -> ForkContext | SpawnContext:
    """How to start workers here: a fork takes milliseconds and shares what this process has loaded.

    spawn where fork is unsafe: outside Linux, and in a process with other threads, whose locks a fork would copy.
    """
    if sys.platform == "linux" and threading.active_count() == 1:
        return multiprocessing.get_context("fork")
    return multiprocessing.get_context("spawn")


class WorkerProcess:
    """A process that calls functions, one at a time. Use it from one thread at a time."""

    def __init__(self, context: ForkContext | SpawnContext) -> None:
        self._connection, theirs = context.Pipe()
        self._function: object = None  # the one that the worker has
        # The kernel ends a child with the thread that started it, which only the main thread is sure to outlive.
        lasting = threading.current_thread() is threading.main_thread()
        self._process = context.Process(target=_work, args=(theirs, os.getpid(), lasting), daemon=True)
        with theirs, _signals_blocked(), warnings.catch_warnings():
            # Python counts native threads, too (BLAS pools); they are idle, and no worker uses them.
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            self._process.start()

    def call(self, function: Callable[[Any], Any], item: object) -> Any:
        """`function(item)`; its exceptions are raised here. ToolkitError when the process dies or lacks memory.

        The function is sent once: pass the same object each time.
        """
        try:
            self._connection.send((None if function is self._function else function, item))
            self._function = function
            succeeded, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(_PATIENCE)
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
        """Let the idle process leave."""
        with suppress(OSError):
            self._connection.send(None)

    def end(self) -> None:
        """Ask the process to stop what it is doing; `join` waits for it."""
        if self._process.is_alive() and self._process.pid:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, _END)

    def join(self) -> None:
        """Wait until the process is gone; one that takes too long is killed."""
        self._process.join(_PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Hold back signals: a child inherits the handlers of its parent until it has set its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_OF_THE_COMMAND, _END})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------------------------------------- in the worker


class _Ended(BaseException):
    """The command wants this worker to leave."""


def _end(_number: int, _frame: FrameType | None) -> None:
    raise _Ended


def _work(connection: Connection, parent: int, lasting: bool) -> None:
    """Answer calls until told to leave; each answer is (True, result) or (False, exception)."""
    for number in _OF_THE_COMMAND:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(_END, _end)
    if not (lasting and die_with_parent(parent)):
        threading.Thread(target=_watch_parent, daemon=True).start()
    gc.freeze()  # what was loaded before stays in pages shared with the parent
    function: Callable[[Any], Any] = _nothing
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_OF_THE_COMMAND, _END})
        while (message := connection.recv()) is not None:
            function = message[0] or function
            answer = _answer(function, message[1])
            try:
                connection.send(answer)
            except BrokenPipeError:
                return
            except Exception as error:  # it cannot be pickled; nothing of it was sent
                connection.send((False, TypeError(f"the answer of {function} cannot be sent: {error}")))
    except (_Ended, EOFError):
        return


def _answer(function: Callable[[Any], Any], item: object) -> tuple[bool, object]:
    try:
        return True, function(item)
    except _Ended:
        raise
    except BaseException as error:
        error.add_note(f"in a worker process:\n{traceback.format_exc()}")
        return False, error


def _nothing(_item: object) -> None:
    """What a worker calls before it was given a function: never."""


def _watch_parent() -> None:
    """End this process when its parent is gone, where the kernel does not do it."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
