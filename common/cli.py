"""The shell around every `main`: one-line errors, exit codes, `--help` that shows an example.

    parser = cli.parser(__doc__)              # the module docstring is the help text
    sys.exit(cli.run(main))

Exit codes: 0 done, 2 bad input (one line on stderr, no traceback), 130 interrupted, 143 and 129 ended by SIGTERM or
SIGHUP: these unwind like an error, so that temporary files are removed and workers ended.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
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


_ENDING = (signal.SIGTERM, signal.SIGHUP)


def run(main: Callable[[], int], signals: bool = True) -> int:
    """Call `main` and turn the errors a user can cure into one line and exit code 2.

    SIGTERM and SIGHUP end it as an exception would, unless `signals` is False, or somebody handles or ignores them
    already (nohup, submitit).
    """
    received: list[signal.Signals] = []
    code = 1
    with _raising_signals(received if signals else None):
        try:
            code = _reported(main)
        except BaseException:  # the exception of the signal, or what broke while it unwound: a terminal that is gone
            if not received:
                raise
    if not received or code == 0:  # an exception inside a destructor is lost; what is done is done
        return code
    with suppress(OSError):
        print(f"ended by {received[0].name}", file=sys.stderr)
    return 128 + received[0]


@contextmanager
def _raising_signals(received: list[signal.Signals] | None) -> Iterator[None]:
    """SystemExit where the main thread is when one of `_ENDING` comes, which is put into `received`."""

    def stop(number: int, _frame: FrameType | None) -> None:
        leaving = sys.exception()
        while leaving is not None and not isinstance(leaving, SystemExit | KeyboardInterrupt):
            leaving = leaving.__context__
        if received is not None and leaving is None:  # else it is on its way out: nothing cuts short the clean-up
            received.append(signal.Signals(number))
            sys.exit(128 + number)

    handled = []
    if received is not None and threading.current_thread() is threading.main_thread():
        handled = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _reported(main: Callable[[], int]) -> int:
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
