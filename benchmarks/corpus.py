"""Benchmarks of the corpus steps.

    python -m benchmarks.corpus blacklist
    python -m benchmarks.corpus extract --articles ../article-extraction-benchmark
    python -m benchmarks.corpus scrape

Each prints a table for docs/benchmarks.md; ratios are within one run on one machine.
"""

import sys
from collections.abc import Sequence

from benchmarks.machine import run_one
from common import cli

_NAMES = {
    "blacklist": "URL rules against the published recipe",
    "charset": "characters lost by encoding and declaration",
    "clean": "cleaning against ftfy and langdetect",
    "dedup": "deduplication against datasketch and rensa",
    "extract": "HTML extraction against a gold standard",
    "merge_index": "merging datasets against megatron-core",
    "scrape": "fetching and extraction against requests",
    "tokenize": "encoding against tiktoken, gigatoken and tokenizers",
    "workers": "one worker against two, many small and few large shards",
    "workflow": "shards on Slurm against Snakemake's plugin and a plain array",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return run_one("corpus", __doc__, _NAMES, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
