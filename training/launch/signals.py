"""Handles signals before training begins, when there is nothing to save, and while a process exits.

leave_at_once()   # first thing in a process of a job: SIGTERM exits with RESUME_ME, at once
with Stop(...):   # training.monitoring.stop takes over: finish the step, save, exit
    ...
ignore_signals()  # the exit code is decided: signals no longer change it
"""

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

from common.errors import RESUME_ME

_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)  # sent by Slurm and submitit before they kill a job
_ending = threading.Event()
save_requested = threading.Event()
"""SIGUSR2 came while the process was starting: a time limit nears, but a step and a save fit.

Without them, a job with a short limit would start again for ever.
"""


def call_on_arrival(act: Callable[[int], None]) -> Callable[[], None]:
    """Call `act` in a thread for each signal that has a handler; returns a function that ends this.

    Python runs a handler only between two bytecodes of the main thread, which may wait in a library
    for minutes. The C-level handler also writes each signal to a socket, which the thread reads.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def listen(_open: socket.socket) -> None:
        with reader:
            while byte := reader.recv(1):
                act(byte[0])

    def end() -> None:
        signal.set_wakeup_fd(before)
        writer.close()  # ends the thread

    threading.Thread(target=listen, args=[writer], name="signals", daemon=True).start()
    return end


def leave_at_once() -> None:
    """Let SIGTERM end this process with RESUME_ME; record SIGUSR2. Call it in the main thread."""
    for number in _SIGNALS:
        signal.signal(number, _left_to_the_thread)
    call_on_arrival(_act)


def _left_to_the_thread(_number: int, _frame: FrameType | None) -> None:
    """The signals' handler."""


def _act(number: int) -> None:
    if number == signal.SIGUSR2:
        save_requested.set()
    elif number == signal.SIGTERM and not _ending.is_set():
        os.write(2, b"SIGTERM before training began: nothing to save; rerun to start\n")
        os._exit(RESUME_ME)


def ignore_signals() -> None:
    """Ignore the signals of `leave_at_once`: this process has an exit code of its own.

    When one task of a job fails, srun sends SIGTERM to the others, which must keep their code.
    """
    _ending.set()
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is _left_to_the_thread:
                signal.signal(number, signal.SIG_IGN)  # Python's own shutdown would restore the deadly default
