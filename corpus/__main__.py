"""List the commands of `corpus`, each with a sentence.

python -m corpus
"""

import sys
from collections.abc import Sequence

from common import cli, verbs

ORDER = (
    "blacklist",
    "scrape",
    "ingest",
    "clean",
    "dedup",
    "decontaminate",
    "train_tokenizer",
    "tokenize",
    "merge_index",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return verbs.main("corpus", ORDER, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
