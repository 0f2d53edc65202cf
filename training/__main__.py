"""List the commands of `training`, each with a sentence.

python -m training
"""

import sys
from collections.abc import Sequence

from common import cli, verbs

ORDER = ("plan", "probe", "train", "evaluate", "generate")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return verbs.main("training", ORDER, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
