"""List the commands of `cluster`, each with a sentence.

python -m cluster
"""

import sys
from collections.abc import Sequence

from common import cli, verbs

ORDER = ("submit", "status", "logs", "cancel")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return verbs.main("cluster", ORDER, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
