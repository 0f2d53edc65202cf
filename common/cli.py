"""What every command shares: its parser, its settings, one-line errors, exit codes and signals.

    parser = cli.parser("corpus.clean", __doc__)             # the module docstring is the help text
    parser.add_argument("--input", type=cli.shards, nargs="+")
    cli.add_settings(parser, "clean")                        # --config FILE, clean.key=value
    arguments = parser.parse_args(argv)                      # checks the paths, too: common.path_options
    settings = cli.read_settings(arguments)
    sys.exit(cli.run(main))

Exit codes: 0 done, 2 bad input (one line on stderr, no traceback), 130 interrupted, 143 and 129 ended by SIGTERM or
SIGHUP. These signals raise an exception, so that temporary files are removed and worker processes end.
"""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from common import job_log
from common.config import TOP_LEVEL, step_settings
from common.console import QUIET, discard, fail
from common.errors import InputError, ToolkitError
from common.files import shard_paths
from common.path_options import (
    Inputs,
    any_files,
    check_paths,
    input_path,
    lists,
    new_folder,
    output_file,
    output_folder,
    output_prefix,
    shards,
)
from common.settings import Experiment, Section, Settings, closest

_TERMINATING = (signal.SIGTERM, signal.SIGHUP)
_AGAIN = 1.0  # seconds after which a swallowed signal is raised again

__all__ = [
    "add_input",
    "add_key_flag",
    "add_model_settings",
    "add_output_shards",
    "add_settings",
    "add_stats",
    "add_step_options",
    "add_workers",
    "any_files",
    "default_signals",
    "input_path",
    "lists",
    "new_folder",
    "output_file",
    "output_folder",
    "output_prefix",
    "output_shards",
    "parser",
    "positive_int",
    "read_settings",
    "run",
    "shards",
]


class _KeyFlag(argparse.Action):
    """A flag that is short for one key of the configuration."""

    def __init__(self, *arguments: Any, key: str, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.key = key

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Append `key=value` to the overrides, with the value as JSON, which is YAML."""
        value = True if self.nargs == 0 else values
        namespace.overrides = [*namespace.overrides, f"{self.key}={json.dumps(value, default=str)}"]


class _Parser(argparse.ArgumentParser):
    keys: frozenset[str] = frozenset()
    """First parts that an override `section.key=value` may have; empty for a command without settings."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.add_argument("--quiet", action="store_true", default=argparse.SUPPRESS, help="show no progress")

    def error(self, message: str) -> NoReturn:
        """Print one line, without argparse's usage block, and exit with code 2."""
        if message.startswith("unrecognized arguments: -"):
            message += closest(message.split()[2], self._option_string_actions)
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does (verbs, too), collect every `section.key=value`, and check the paths."""
        given = list(sys.argv[1:] if args is None else args)
        overrides, others = list[str](), list[str]()
        for before, text in zip(["", *given], given, strict=False):
            (overrides if self._is_override(before, text) else others).append(text)
        found, rest = super().parse_known_args(others, namespace)
        if self.keys:  # most likely a misspelt section: validation names the closest one
            unknown = [text for text in rest if "=" in text and not text.startswith("-")]
            rest = [text for text in rest if text not in unknown]
            found.overrides = [*found.overrides, *overrides, *unknown]
        if found.__dict__.pop("quiet", False):
            os.environ[QUIET] = "1"  # of the processes that it starts, too
        check_paths(self._given(found))
        return found, rest

    def _is_override(self, before: str, text: str) -> bool:
        """Whether an argument is `section.key=value`, and neither the value of an option nor a file."""
        key, separator, _ = text.partition("=")
        if not separator or key.split(".")[0] not in self.keys or os.path.lexists(text):
            return False
        option = self._option_string_actions.get(before)
        return option is None or option.nargs == 0

    def _given(self, found: argparse.Namespace) -> Iterable[tuple[Any, Any]]:
        """(type, value) of each argument that was given."""
        for action in self._actions:
            value = getattr(found, action.dest, None)
            for one in value if isinstance(value, list) else [value]:
                if one is not None:
                    yield action.type, one


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m MODULE` whose help is the module's docstring, examples and all."""
    return _Parser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def positive_int(text: str) -> int:
    """Type of an option that counts something: 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def add_settings(parser: argparse.ArgumentParser, section: str = "") -> None:
    """Add `--config FILE`, and accept `section.key=value` anywhere among the arguments; see `read_settings`."""
    assert isinstance(parser, _Parser)
    parser.keys = frozenset(Settings.model_fields)
    parser.set_defaults(overrides=[])
    used = f", of which this command uses the section {section}" if section else ""
    parser.add_argument(
        "--config",
        type=input_path,
        metavar="FILE",
        help=f"configuration file{used}; {section or 'section'}.key=value replaces one key",
    )


def add_model_settings(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add `--config FILE --model NAME`, and accept `section.key=value` for that model; see `add_settings`."""
    assert isinstance(parser, _Parser)
    parser.keys = frozenset(Experiment.model_fields) | TOP_LEVEL
    parser.set_defaults(overrides=[])
    parser.add_argument("--config", type=input_path, required=required, metavar="FILE", help="configuration")
    parser.add_argument(
        "--model",
        required=required,
        metavar="NAME",
        help="name of a model under models: in the configuration; section.key=value replaces one of its keys, "
        "cluster.key=value or run=FOLDER one outside models:",
    )


def add_key_flag(
    parser: argparse.ArgumentParser, flag: str, key: str, root: type[Section] = Settings, **options: Any
) -> None:
    """Add a flag that is short for `key=VALUE`; its help is the key's description. `options` go to argparse.

    `root` is Experiment for the keys of `add_model_settings`.
    """
    section: Any = root
    for name in key.split("."):
        field = section.model_fields[name]
        section = field.annotation
    meaning = " ".join((field.description or "").split()).partition(". ")[0].rstrip(".").replace("%", "%%")
    parser.add_argument(flag, action=_KeyFlag, key=key, default=argparse.SUPPRESS, help=f"{key}: {meaning}", **options)


def read_settings(arguments: argparse.Namespace) -> Settings:
    """The settings of `--config`, the flags and the overrides, validated together. Raises ConfigError."""
    return step_settings(arguments.config, arguments.overrides, getattr(arguments, "model", None))


def add_input(parser: argparse.ArgumentParser, kind: Inputs = shards, *, required: bool = True) -> None:
    """Add `--input` for shards of documents, or for lists."""
    parser.add_argument(
        "--input", type=kind, nargs="+", required=required, metavar="PATH", help="files, folders, globs"
    )


def add_output_shards(parser: argparse.ArgumentParser, content: str, ending: str) -> None:
    """Add `--output FILE`, or `--output-dir DIR --shards N`; see `output_shards`."""
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--output", type=output_file, metavar="FILE", help=content)
    output.add_argument("--output-dir", type=output_folder, metavar="DIR", help=f"folder for 0000{ending}, …")
    parser.add_argument("--shards", type=positive_int, metavar="N", help="number of shards in --output-dir")


def output_shards(arguments: argparse.Namespace, ending: str) -> list[Path]:
    """The files that the options of `add_output_shards` name. Raises InputError if one option is missing."""
    if (arguments.output_dir is None) != (arguments.shards is None):
        raise InputError("--output-dir and --shards belong together; give both or neither")
    if arguments.output:
        return [arguments.output]
    return shard_paths(arguments.output_dir, arguments.shards, ending)


def add_stats(parser: argparse.ArgumentParser) -> None:
    """Add `--stats`."""
    parser.add_argument("--stats", type=output_file, metavar="FILE", help="statistics, as JSON")


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add `--workers`."""
    parser.add_argument("--workers", type=positive_int, default=1, metavar="N", help="processes (default 1)")


def add_step_options(parser: argparse.ArgumentParser, section: str) -> None:
    """Add the options that every step over shards has in addition to its inputs and outputs."""
    parser.add_argument("--rejects", type=output_file, metavar="FILE", help="dropped documents, with the reasons")
    add_stats(parser)
    add_workers(parser)
    add_settings(parser, section)
    parser.add_argument("--allow-empty", action="store_true", help="allow a shard with no documents left")


def run(main: Callable[[], int], signals: bool = True) -> int:
    """Call `main` and return its exit code; errors that a user can cure become one line and exit code 2.

    SIGTERM and SIGHUP raise an exception inside `main`, unless `signals` is False or they are handled or ignored
    already (submitit, nohup).
    """
    received: list[signal.Signals] = []
    code = 1
    with _raising_signals(received if signals else None):
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
def _raising_signals(received: list[signal.Signals] | None) -> Iterator[None]:
    """Raise SystemExit in the main thread for a signal of `_TERMINATING`, and append it to `received`.

    It is raised again every second while `main` goes on: langdetect swallows every exception, and so does PyTorch
    while it is imported.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        leaving = sys.exception()
        while leaving is not None and not isinstance(leaving, SystemExit | KeyboardInterrupt):
            leaving = leaving.__context__
        if received is not None and leaving is None:  # otherwise it is ending already: do not interrupt the clean-up
            if number != signal.SIGALRM:
                received.append(signal.Signals(number))
                if signal.SIGALRM in handled:
                    signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
            sys.exit(128 + number)

    handled = []
    if received is not None and threading.current_thread() is threading.main_thread():
        numbers = (*_TERMINATING, signal.SIGALRM)
        handled = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, stop)
    try:
        yield
    finally:
        if signal.SIGALRM in handled:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def default_signals() -> Iterator[None]:
    """Let a signal end the process at once, around a library call that keeps the main thread and writes no file."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *_TERMINATING)}
    handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


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
