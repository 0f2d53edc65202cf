"""Run a command: errors become one line and an exit code, SIGTERM and SIGHUP an exception."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from common import job_log
from common.console import discard, fail
from common.errors import InputError, ToolkitError
from common.user import name_user


def refuse_other_copy(folder: Path) -> None:
    """Raise InputError if a folder holds another copy of the toolkit than this one.

    `snakemake` and `urls-to-gpt2` run the installed copy, but their jobs (`python -m …`) that of
    the working folder.
    """
    ours, other = Path(__file__).resolve().parents[2], folder.resolve()
    if other != ours and all((other / name).is_file() for name in ("common/errors.py", "corpus/runner.py")):
        raise InputError(
            f"{other}: holds another copy of the toolkit than {ours}, which runs; use one of them: "
            f"pip install -e {other}, or work in a folder of your own (urls-to-gpt2 init)"
        )


def run(main: Callable[[], int], signals: bool = True) -> int:
    """Call `main` and return its exit code; user errors become one line and exit code 2.

    SIGTERM and SIGHUP raise an exception inside `main`, unless `signals` is False or they are
    handled or ignored already (submitit, nohup).
    """
    name_user()
    code = 1
    with _raising_signals(signals) as received:
        try:
            code = _report_errors(main)
        except BaseException:  # the signal's exception, or an error during its clean-up, such as a closed terminal
            if not received:
                raise
    if code == 0:
        job_log.finish()
    if not received or code == 0:  # Python drops an exception raised in a destructor: the work was finished
        return code
    with suppress(OSError):
        print(f"ended by {received[0].name}", file=sys.stderr)
    return 128 + received[0]


@contextmanager
def _raising_signals(enabled: bool) -> Iterator[list[signal.Signals]]:
    """Raise SystemExit for SIGTERM and SIGHUP if `enabled`; yields the list of received signals."""
    received: list[signal.Signals] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        leaving = sys.exception()
        while leaving is not None and not isinstance(leaving, SystemExit | KeyboardInterrupt):
            leaving = leaving.__context__
        if leaving is None:  # otherwise it is ending already: do not interrupt the clean-up
            received.append(signal.Signals(number))
            sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP) if enabled else ()
    handled = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _report_errors(main: Callable[[], int]) -> int:
    try:
        return main()
    except ToolkitError as error:
        return fail(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if isinstance(error, BrokenPipeError) and not error.filename:
            discard(1)
            return 0
        return fail(error)
