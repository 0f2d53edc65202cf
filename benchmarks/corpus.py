"""Benchmarks of the corpus steps.

    python -m benchmarks.corpus blacklist
    python -m benchmarks.corpus extract --articles ../article-extraction-benchmark
    python -m benchmarks.corpus scrape

Each prints a table for docs/benchmarks.md; ratios are within one run on one machine.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from common import cli

_NAMES = {
    "blacklist": "URL rules against the published recipe",
    "clean": "cleaning against ftfy and langdetect",
    "dedup": "deduplication against datasketch and rensa",
    "extract": "HTML extraction against a gold standard",
    "merge_index": "merging datasets against megatron-core",
    "scrape": "fetching and extraction against requests",
    "tokenize": "encoding against tiktoken, gigatoken and tokenizers",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("benchmarks.corpus", __doc__)
    verbs = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    modules = {name: import_module(f"benchmarks.{name}") for name in _NAMES}
    for name, summary in _NAMES.items():
        modules[name].add_options(verbs.add_parser(name, help=summary))
    arguments = parser.parse_args(argv)
    print(modules[arguments.name].measure(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
