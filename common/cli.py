"""The shell around every `main`: one-line errors, exit codes, `--help` that shows an example.

    parser = cli.parser(__doc__)              # the module docstring is the help text
    sys.exit(cli.run(main))

Exit codes: 0 done, 2 bad input (one line on stderr, no traceback), 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from common.errors import ToolkitError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, without argparse's usage block."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m MODULE` whose help is the module's docstring, examples and all."""
    return _Parser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def positive_int(text: str) -> int:
    """An argument that counts something: 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def add_step_options(parser: argparse.ArgumentParser, section: str) -> None:
    """The options that every corpus step over shards of documents has."""
    parser.add_argument("--rejects", type=Path, metavar="FILE", help="dropped documents with their reasons")
    parser.add_argument("--stats", type=Path, metavar="FILE", help="what was counted, as JSON")
    parser.add_argument("--workers", type=positive_int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"read the section `{section}`")
    parser.add_argument("--allow-empty", action="store_true", help="a shard may end empty")


def run(main: Callable[[], int]) -> int:
    """Call `main` and turn the errors a user can cure into one line and exit code 2."""
    try:
        return main()
    except ToolkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        _close_stdout()
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def say(text: str) -> None:
    """Print a line at once; where its reader went away, say no more: for work that must not end for that."""
    try:
        print(f"{text}\n", end="", flush=True)  # in one piece: threads say something, too
    except BrokenPipeError:
        _close_stdout()


def _close_stdout() -> None:
    """The reader of our output went away (`… | head`): what is still to be flushed must go somewhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
