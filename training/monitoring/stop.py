"""Stops training early but cleanly: on a signal, Ctrl-C, or a file named `stop`.

    touch results/demo/models/tiny/stop         # finish the step, save, exit
    scancel --signal=TERM JOBID                 # the same; a job of cluster.submit is then requeued

The signal handler only sets a flag: the processes agree on it at the end of a step, save together,
and exit with RESUME_ME. A second Ctrl-C ends the process at once, by a thread that does not need
the main thread. Signals before `Stop` is entered are those of `training.launch.signals`.

The file is renamed to `stopped`: a person asked, so nobody restarts the run unasked.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from training.launch.signals import call_on_arrival, save_requested
from training.model_folder import stop_file, stopped_mark
from training.monitoring.run_lock import RunLock

# from Slurm (scancel, preemption), from submitit before the time limit, Ctrl-C, a closed terminal
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
_FROM_TERMINAL = (signal.SIGINT, signal.SIGHUP)
_FORWARDED = 2.0  # seconds in which torchrun repeats a Ctrl-C that its workers have received already

CONTINUE, SAVE, LEAVE = range(3)  # requests; the most urgent one of all ranks is followed


class Stop:
    """Handles the signals inside `with`, and records whether this process was asked to stop.

    A signal that was ignored before (`nohup`, a shell's background job) stays ignored. After `with`
    the old handlers are restored. If the run has stopped, signals are ignored instead: srun ends
    all tasks when the first one exits, and that must not change the exit codes of the others.
    """

    def __init__(self, folder: Path, lock: RunLock) -> None:
        self.file, self._lock = stop_file(folder), lock
        self.reason = ""  # the signal's name or the file's path; empty on ranks that were not asked
        self._stopped = False
        self._interrupted = 0.0  # when Ctrl-C came first

    def __enter__(self) -> "Stop":
        ignored = {number for number in _FROM_TERMINAL if signal.getsignal(number) is signal.SIG_IGN}
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS if number not in ignored}
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._end_calls = call_on_arrival(self._arrived)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._stopped else handler)
        self._end_calls()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name

    def _arrived(self, number: int) -> None:
        """Handle a signal in a thread, when it arrives."""
        now = time.monotonic()
        if number == signal.SIGHUP:
            for descriptor in self._terminals:  # further output goes to /dev/null
                if not os.isatty(descriptor):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        elif number == signal.SIGINT and not self._interrupted:
            self._interrupted = now
            if self._lock.rank == 0 and os.isatty(2):
                print("\nfinishing the step, then saving; Ctrl-C again to exit at once", file=sys.stderr)
        elif number == signal.SIGINT and now - self._interrupted > (
            _FORWARDED if "TORCHELASTIC_RUN_ID" in os.environ else 0
        ):
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(128 + number)

    def poll(self) -> int:
        """Check the file and the lock (rank 0); returns CONTINUE, SAVE, or LEAVE without saving.

        SAVE: save, then exit. LEAVE: another job has taken the folder.
        """
        if self._lock.rank == 0:
            if self._lock.poll():
                return LEAVE
            if self.file.exists():
                self.reason = str(self.file)
        if save_requested.is_set():
            self.reason = signal.SIGUSR2.name
        return SAVE if self.reason else CONTINUE

    def mark_stopped(self) -> None:
        """Note that the run has stopped, and rename the file: it must not stop the next start."""
        self._stopped = True
        if self._lock.rank == 0 and self._lock.is_held():
            with suppress(FileNotFoundError):
                self.file.replace(stopped_mark(self.file.parent))
