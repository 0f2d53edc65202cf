"""A clean end before the last iteration: SIGTERM, SIGUSR2, or a file.

    touch results/demo/models/tiny/stop         # finish the step, save, leave
    scancel --signal=TERM --full JOBID          # the same

The handler sets a flag and no more: processes agree on it at the end of a step, save together, and exit with RESUME_ME.
"""

import signal
from pathlib import Path
from types import FrameType

from training.watch.owner import Owner

RESUME_ME = 75  # EX_TEMPFAIL of sysexits.h: start the same command again, and it goes on
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)  # Slurm's at scancel and preemption; submitit's before the time limit

NOT, SAVE, LEAVE = range(3)  # what `wanted` says; the most urgent one of all ranks is followed


class Stop:
    """Whether this process has been asked to stop.

    After `with` the signals have their old meaning again, but for a run that has stopped: it is on its way out, and
    srun, which ends all tasks when the first one leaves with a code, must not change the code of the others.
    """

    def __init__(self, folder: Path, owner: Owner) -> None:
        self.file, self.owner = folder / "stop", owner
        self.reason = ""
        """What asked for it; empty on processes that were not asked themselves."""
        self._stopped = False

    def __enter__(self) -> "Stop":
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._stopped else handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name

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
        if self.owner.rank == 0:
            self.file.unlink(missing_ok=True)
