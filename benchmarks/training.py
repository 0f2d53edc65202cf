"""Benchmarks of training.

    python -m benchmarks.training data

Each prints a table for docs/benchmarks.md; ratios are within one run on one machine.
"""

import sys
from collections.abc import Sequence

from benchmarks.machine import run_one
from common import cli

_NAMES = {
    "data": "the order of an epoch against megatron-core's C++ helper",
    "step": "an optimiser step against transformers and a plain loop, and on 2 processes",
    "checkpoint": "saves and loads against a plain copy of the files, and saves in the background",
    "convert": "merging Megatron-LM's and our checkpoints against a copy of the result",
    "generate": "tokens per second against transformers.generate, and without the KV cache",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return run_one("training", __doc__, _NAMES, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
