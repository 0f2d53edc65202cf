"""Stops training early but cleanly: on SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR2, or a file named `stop`.

    touch results/demo/models/tiny/stop         # finish the step, save, exit
    scancel --signal=TERM JOBID                 # the same; a job of cluster.submit is then requeued

The signal handler only sets a flag: the processes agree on it at the end of a step, save together, and exit with
RESUME_ME. A second Ctrl-C ends the process at once, whatever it is doing: a thread that does not need the main thread
takes care of that. Signals before `Stop` is entered are those of `training.leaving`.

The file is renamed to `stopped`, which says that a person asked, so that nobody starts the run again unasked.
"""

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from training.leaving import INTERRUPTED, told_to_save
from training.model_folder import stop_file, stopped_mark
from training.monitoring.run_claim import RunClaim

# sent by Slurm at scancel and preemption; by submitit before the time limit; by Ctrl-C; by a closed terminal
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
_FROM_TERMINAL = (signal.SIGINT, signal.SIGHUP)
_FORWARDED = 2.0  # seconds in which torchrun repeats a Ctrl-C that its workers have received already

CONTINUE, SAVE, LEAVE = range(3)  # requests; the most urgent one of all ranks is followed


class Stop:
    """Handles the signals inside `with`, and records whether this process was asked to stop.

    A signal that was ignored before (`nohup`, a shell's background job) stays ignored. After `with` the old handlers
    are restored, unless the run has stopped: then the signals are ignored, because srun ends all tasks when the first
    one exits with a code, and that must not change the exit codes of the others.
    """

    def __init__(self, folder: Path, claim: RunClaim) -> None:
        self.file, self._claim = stop_file(folder), claim
        self.reason = ""
        """The signal's name or the file's path; empty on processes that were not asked themselves."""
        self._stopped = False

    def __enter__(self) -> "Stop":
        ignored = {number for number in _FROM_TERMINAL if signal.getsignal(number) is signal.SIG_IGN}
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS if number not in ignored}
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._stopped else handler)
        signal.set_wakeup_fd(self._wakeup)
        self._writer.close()  # ends the thread

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name

    def _watch(self) -> None:
        """The thread: receives each signal as a byte, written by the C-level handler."""
        interrupted = 0.0
        with self._reader:
            while byte := self._reader.recv(1):
                if byte[0] == signal.SIGHUP:
                    self._detach_from_terminals()
                if byte[0] != signal.SIGINT:
                    continue
                now = time.monotonic()
                if not interrupted:
                    interrupted = now
                    if self._claim.rank == 0 and os.isatty(2):
                        print("\nfinishing the step, then saving; Ctrl-C again to leave at once", file=sys.stderr)
                elif now - interrupted > (_FORWARDED if "TORCHELASTIC_RUN_ID" in os.environ else 0):
                    print("interrupted", file=sys.stderr, flush=True)
                    os._exit(INTERRUPTED)

    def _detach_from_terminals(self) -> None:
        """Send further output to /dev/null if its terminal is gone."""
        for descriptor in self._terminals:
            if not os.isatty(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)

    def poll(self) -> int:
        """Look for the file and the claim (rank 0); returns CONTINUE, SAVE (then exit), or LEAVE without saving.

        LEAVE: another job has claimed the folder.
        """
        if self._claim.rank == 0:
            if self._claim.poll():
                return LEAVE
            if self.file.exists():
                self.reason = str(self.file)
        if told_to_save.is_set():
            self.reason = signal.SIGUSR2.name
        return SAVE if self.reason else CONTINUE

    def mark_stopped(self) -> None:
        """Note that the run has stopped, and rename the file: it must not stop the next start."""
        self._stopped = True
        if self._claim.rank == 0 and self._claim.is_held():
            with suppress(FileNotFoundError):
                self.file.replace(stopped_mark(self.file.parent))
