"""List the commands of `convert`, each with a sentence.

python -m convert
"""

import sys
from collections.abc import Sequence

from common import cli, verbs

ORDER = ("merge_mp",)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return verbs.main("convert", ORDER, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
