"""A clean end before the last iteration: SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR2, or a file.

    touch results/demo/models/tiny/stop         # finish the step, save, leave
    scancel --signal=TERM --full JOBID          # the same

The handler sets a flag and no more: processes agree on it at the end of a step, save together, and exit with RESUME_ME.
A second Ctrl-C ends the process at once, wherever it is: a thread that needs no turn of the main one sees to that.
"""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from training.monitoring.run_claim import RunClaim

RESUME_ME = 75  # EX_TEMPFAIL of sysexits.h: start the same command again, and it goes on
INTERRUPTED = 130
# Slurm's at scancel and preemption; submitit's before the time limit; a person's; a terminal's that is closed
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
_FROM_TERMINAL = (signal.SIGINT, signal.SIGHUP)
_FORWARDED = 2.0  # seconds in which torchrun repeats the Ctrl-C that its workers have had already

NOT, SAVE, LEAVE = range(3)  # what `wanted` says; the most urgent one of all ranks is followed


class Stop:
    """Whether this process has been asked to stop.

    A signal that was ignored before (`nohup`, a shell's background job) stays ignored. After `with` the signals have
    their old meaning again, but for a run that has stopped: it is on its way out, and srun, which ends all tasks when
    the first one leaves with a code, must not change the code of the others.
    """

    def __init__(self, folder: Path, owner: RunClaim) -> None:
        self.file, self.owner = folder / "stop", owner
        self.reason = ""
        """What asked for it; empty on processes that were not asked themselves."""
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
        signal.set_wakeup_fd(self._wakeup)
        self._writer.close()  # ends the thread
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._stopped else handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name

    def _watch(self) -> None:
        """The thread: gets each signal as a byte, from the handler that the system calls."""
        interrupted = 0.0
        with self._reader:
            while byte := self._reader.recv(1):
                if byte[0] == signal.SIGHUP:
                    self._leave_terminals()
                if byte[0] != signal.SIGINT:
                    continue
                now = time.monotonic()
                if not interrupted:
                    interrupted = now
                    if self.owner.rank == 0 and os.isatty(2):
                        print("\nfinishing the step, then saving; Ctrl-C again to leave at once", file=sys.stderr)
                elif now - interrupted > (_FORWARDED if "TORCHELASTIC_RUN_ID" in os.environ else 0):
                    print("interrupted", file=sys.stderr, flush=True)
                    os._exit(INTERRUPTED)

    def _leave_terminals(self) -> None:
        """What is still to be said must go somewhere when the terminal is gone."""
        for descriptor in self._terminals:
            if not os.isatty(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)

    def wanted(self) -> int:
        """NOT, SAVE (and leave), or LEAVE without saving because another job has the folder now."""
        if self.owner.rank == 0:
            if self.owner.lost():
                return LEAVE
            if self.file.exists():
                self.reason = str(self.file)
        return SAVE if self.reason else NOT

    def followed(self) -> None:
        """The run has stopped. A file has had its effect then: the next start is not meant."""
        self._stopped = True
        if self.owner.rank == 0 and self.owner.mine():
            self.file.unlink(missing_ok=True)
