"""Run a command in a throw-away Slurm on this machine; returns the command's exit code.

    python -m tests.slurm.lab -- sinfo
    python -m tests.slurm.lab --nodes 4 --gpus 2 -- srun --nodes 4 --gres gpu:1 hostname

Nothing outside its folder is touched. Partition `main` is the default; jobs in `low` are preempted if `main` needs
their nodes. The GPUs are fake: Slurm counts them and sets CUDA_VISIBLE_DEVICES.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.slurm.lab.cluster import Lab, missing, slurm

ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
GOODBYE = 10  # seconds that the command has after one of them


class _Ended(BaseException):
    """One of ENDINGS came."""

    def __init__(self, number: int) -> None:
        self.number = number


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code of the command that ran in the lab."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.lab", description=__doc__, formatter_class=raw)
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="nodes of 8 CPUs (default 2)")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="fake GPUs per node (default 0)")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --: what to run in the lab")
    options = parser.parse_args(argv)
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    for number in ENDINGS:
        signal.signal(number, _end)
    try:
        with TemporaryDirectory(prefix="slurm-lab-") as folder:
            with slurm(Path(folder), options.nodes, options.gpus) as lab:
                return _run(lab, options.command)
    except _Ended as ended:
        return 128 + ended.number
    except (RuntimeError, TimeoutError, ValueError) as error:  # a daemon did not start
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(lab: Lab, command: list[str]) -> int:
    process = subprocess.Popen([*lab.inside(), *command], env=lab.environment)
    try:
        code = process.wait()
        return code if code >= 0 else 128 - code
    except _Ended as ended:
        if ended.number != signal.SIGINT:  # Ctrl-C goes to the command, too
            process.send_signal(ended.number)
        try:
            process.wait(GOODBYE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    finally:
        _ignore_endings()


def _end(number: int, _: object) -> None:
    _ignore_endings()
    raise _Ended(number)


def _ignore_endings() -> None:
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
