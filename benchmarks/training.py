"""Benchmarks of training.

    python -m benchmarks.training data

Each prints a table for docs/benchmarks.md; ratios are within one run on one machine.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from common import cli

_NAMES = {
    "data": "the order of an epoch against megatron-core's C++ helper",
    "generate": "tokens a second against transformers.generate, and without the cache of keys and values",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("benchmarks.training", __doc__)
    verbs = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    modules = {name: import_module(f"benchmarks.{name}") for name in _NAMES}
    for name, summary in _NAMES.items():
        modules[name].add_options(verbs.add_parser(name, help=summary))
    arguments = parser.parse_args(argv)
    print(modules[arguments.name].measure(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
