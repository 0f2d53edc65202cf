"""Run a command while N processes keep the cores busy: a gate that passes only on a quiet machine
is red by chance.

    python -m tests.load 8 -- make test

Exits with the command's code. The processes end with it, and with this one.
"""

import os
import subprocess
import sys
from multiprocessing import get_context


def _compute(parent: int) -> None:
    """Compute until the parent has ended, however it ended."""
    while os.getppid() == parent:
        sum(range(100_000))


def main(words: list[str]) -> int:
    """Command line; returns the exit code of the command."""
    if len(words) < 3 or not words[0].isdigit() or words[1] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    busy = [get_context("spawn").Process(target=_compute, args=(os.getpid(),)) for _ in range(int(words[0]))]
    for process in busy:
        process.start()
    try:
        return subprocess.call(words[2:])
    finally:
        for process in busy:
            process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
