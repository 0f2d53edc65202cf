"""The exit codes of a training job, and what signals do to a process that has nothing to save yet.

    leave_at_once()      # first thing in a process of a job, before torch is imported
    ...                  # SIGTERM: exit code RESUME_ME, at once; SIGUSR2: save after the first step
    with Stop(...):      # training.monitoring.stop takes the signals over: finish the step, save, exit
        ...
    disarm()             # the exit code is decided: signals no longer change it

Python runs a signal's handler only between two bytecodes of the main thread, which may wait in a library for minutes.
The C-level handler writes each signal to a socket instead, and a thread that reads there ends the process.
"""

import os
import signal
import socket
import threading
from types import FrameType

TO_CURE = 2  # an error that a person must cure before the next start
RESUME_ME = 75  # EX_TEMPFAIL of sysexits.h: the same command, started again, continues
TAKEN_OVER = 76  # a newer job has the model folder; nothing is left to do here
INTERRUPTED = 130

_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)  # sent by Slurm and submitit before they kill a job
_disarmed = threading.Event()
told_to_save = threading.Event()
"""SIGUSR2 came while the process was starting. It announces a time limit, so there is time for a step and a checkpoint:
without one, a job with a short limit would start again for ever."""


def leave_at_once() -> None:
    """From now on, SIGTERM ends this process with RESUME_ME and SIGUSR2 is noted; call it in the main thread."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    for number in _SIGNALS:
        signal.signal(number, _left_to_the_thread)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, writer), name="leave at once", daemon=True).start()


def _left_to_the_thread(_number: int, _frame: FrameType | None) -> None:
    """The signals' handler."""


def _watch(reader: socket.socket, _writer: socket.socket) -> None:
    """The thread; it keeps the other end of the socket open."""
    while byte := reader.recv(1):
        if byte[0] == signal.SIGUSR2:
            told_to_save.set()
        elif byte[0] == signal.SIGTERM and not _disarmed.is_set():
            os.write(2, b"SIGTERM before training began: nothing to save; start again to go on\n")
            os._exit(RESUME_ME)


def disarm() -> None:
    """The process is ending with a code of its own: signals that leave_at_once() handles are ignored from now on.

    When one task of a job fails, srun sends SIGTERM to the others, which must not turn an error into RESUME_ME.
    """
    _disarmed.set()
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is _left_to_the_thread:
                signal.signal(number, signal.SIG_IGN)  # Python's own shutdown would restore the deadly default
