"""The shell around every `main`: one-line errors, exit codes, `--help` that shows an example, paths that are checked.

    parser = cli.parser("corpus.clean", __doc__)             # the module docstring is the help text
    parser.add_argument("--input", type=cli.shards, nargs="+")
    parser.add_argument("--output", type=cli.output_file)
    sys.exit(cli.run(main))

Options that name files say by their `type` what they are. Parsing refuses an output that cannot be written, two that
are one file, and one that is an input, before anything is read.

Exit codes: 0 done, 2 bad input (one line on stderr, no traceback), 130 interrupted, 143 and 129 ended by SIGTERM or
SIGHUP: these unwind like an error, so that temporary files are removed and workers ended.
"""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from common.config import step_settings
from common.console import discard
from common.errors import InputError, ToolkitError
from common.files import Kind, check_outputs, exists, find_inputs, is_stdout, locate
from common.settings import Experiment, Settings


def _require_text(text: str) -> None:
    if not text:
        raise argparse.ArgumentTypeError("is the empty string; name a path (. is the working folder)")


@dataclass(frozen=True)
class _Inputs:
    """Type of an option for files that are read: a path, a folder or a glob, left as it is."""

    kind: Kind

    def __call__(self, text: str) -> str:
        _require_text(text)
        return text


def input_path(text: str) -> Path:
    """Type of an option for one file or folder that is read."""
    _require_text(text)
    return Path(text)


@dataclass(frozen=True)
class _Output:
    """Type of an option for what is written: one file, or those whose names begin with a prefix."""

    endings: tuple[str, ...] = ("",)
    regular: bool = False
    """Whether pipes and devices are refused."""

    def __call__(self, text: str) -> Path:
        _require_text(text)
        path = Path(text)
        if text.endswith(("/", "/.")) or path.name in ("", ".."):
            raise argparse.ArgumentTypeError(f"{text}: is a folder; name a file in it")
        return path

    def files(self, path: Path) -> list[Path]:
        """The files that the option stands for. InputError for one that cannot be written."""
        files = [path.with_name(path.name + ending) for ending in self.endings]
        # a PREFIX may be the name of a folder, too, but nobody means the files /dev/null.bin and /dev/null.idx
        for file in files if path.is_dir() and self.endings != ("",) else [path, *files]:
            if locate(file).stream and self.regular:
                raise InputError(f"{file}: is no regular file, which this output has to be; choose another one")
        return files


shards, lists, any_files = _Inputs("shards"), _Inputs("lists"), _Inputs("files")
"""Types of options that take paths, folders and globs of documents; of URL lists and texts; of anything else."""
output_file, regular_file = _Output(), _Output(regular=True)
"""Types of options for one file; the second one is for files that cannot be streams."""


def output_prefix(ending: str = "") -> _Output:
    """Type of an option for the PREFIX of a dataset, without an `ending` that the step adds."""
    return _Output(tuple(ending + suffix for suffix in (".bin", ".idx", ".json")), regular=True)


def output_folder(text: str) -> Path:
    """Type of an option for a folder that files are written to; it may exist."""
    _require_text(text)
    path = Path(text)
    for folder in (path, *path.parents):
        if os.path.lexists(folder):
            if not folder.is_dir():
                raise argparse.ArgumentTypeError(f"{folder}: is no folder; choose another one")
            break
    return path


def new_folder(text: str) -> Path:
    """Type of an option for a folder that is replaced as a whole, and needs a name for that."""
    path = output_folder(text)
    if path.name in ("", ".."):
        raise argparse.ArgumentTypeError(f"{text}: cannot be replaced; name a folder inside it")
    return path


class _KeyFlag(argparse.Action):
    """A flag that is short for one key of the configuration."""

    def __init__(self, *arguments: Any, key: str, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.key = key

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Append `key=value`; JSON is YAML."""
        value = True if self.nargs == 0 else values
        namespace.overrides = [*namespace.overrides, f"{self.key}={json.dumps(value, default=str)}"]


class _Parser(argparse.ArgumentParser):
    keys: frozenset[str] = frozenset()
    """Names that the first part of an override may have; empty for a command without settings."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, without argparse's usage block."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, take out `section.key=value` wherever it stands, and check the paths.

        argparse calls this for the options of a verb, too.
        """
        given = list(sys.argv[1:] if args is None else args)
        overrides = [text for before, text in zip(["", *given], given, strict=False) if self._overrides(before, text)]
        found, rest = super().parse_known_args([text for text in given if text not in overrides], namespace)
        if self.keys:  # what is left over is most likely a misspelt section, and the settings name the closest one
            unknown = [text for text in rest if "=" in text and not text.startswith("-")]
            rest = [text for text in rest if text not in unknown]
            found.overrides = [*found.overrides, *overrides, *unknown]
        self._check_paths(found)
        return found, rest

    def _overrides(self, before: str, text: str) -> bool:
        """Whether an argument is `section.key=value`, and neither the value of an option nor a file."""
        key, separator, _ = text.partition("=")
        if not separator or key.split(".")[0] not in self.keys or os.path.lexists(text):
            return False
        option = self._option_string_actions.get(before)
        return option is None or option.nargs == 0

    def _given(self, found: argparse.Namespace) -> Iterable[tuple[Any, Any]]:
        """(type, value) of each path among the arguments."""
        for action in self._actions:
            value = getattr(found, action.dest, None)
            for one in value if isinstance(value, list) else [value]:
                if one is not None:
                    yield action.type, one

    def _check_paths(self, found: argparse.Namespace) -> None:
        given = list(self._given(found))
        outputs = [path for kind, value in given if isinstance(kind, _Output) for path in kind.files(value)]
        inputs: list[Path] = []
        if any(map(exists, outputs)):  # one that is not there is no input
            inputs = [value for kind, value in given if kind is input_path]
            for kind, value in given:
                inputs += find_inputs(value, kind.kind)[0] if isinstance(kind, _Inputs) else []
        check_outputs(outputs, inputs)
        if any(map(is_stdout, outputs)):
            sys.stdout = sys.stderr  # what is said to people must not stand among the data


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


def add_settings(parser: argparse.ArgumentParser, section: str) -> None:
    """Let a command take settings: `--config FILE`, and `section.key=value` for single keys. See `read_settings`."""
    assert isinstance(parser, _Parser)
    parser.keys = frozenset(Settings.model_fields)
    parser.set_defaults(overrides=[])
    parser.add_argument(
        "--config",
        type=input_path,
        metavar="FILE",
        help=f"configuration, of which this command uses {section}; {section}.key=value replaces one key",
    )


def add_model_settings(parser: argparse.ArgumentParser) -> None:
    """Let a command take the settings of one model: `--config FILE --model NAME`, and `section.key=value` of it."""
    assert isinstance(parser, _Parser)
    parser.keys = frozenset(Experiment.model_fields)
    parser.set_defaults(overrides=[])
    parser.add_argument("--config", type=input_path, required=True, metavar="FILE", help="configuration")
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="a name under models: in the configuration; section.key=value replaces one of its keys",
    )


def add_key_flag(parser: argparse.ArgumentParser, flag: str, key: str, **options: Any) -> None:
    """Add a flag that is short for `key=VALUE`; its help is the key's description. `options` as in argparse."""
    section: Any = Settings
    for name in key.split("."):
        field = section.model_fields[name]
        section = field.annotation
    meaning = " ".join((field.description or "").split()).partition(". ")[0].rstrip(".").replace("%", "%%")
    parser.add_argument(flag, action=_KeyFlag, key=key, default=argparse.SUPPRESS, help=f"{key}: {meaning}", **options)


def read_settings(arguments: argparse.Namespace) -> Settings:
    """The settings that the command line names, validated together. Raises ConfigError."""
    return step_settings(arguments.config, arguments.overrides, getattr(arguments, "model", None))


def add_step_options(parser: argparse.ArgumentParser, section: str) -> None:
    """Add the options that every corpus step over shards of documents has."""
    parser.add_argument("--rejects", type=output_file, metavar="FILE", help="dropped documents with their reasons")
    parser.add_argument("--stats", type=output_file, metavar="FILE", help="what was counted, as JSON")
    parser.add_argument("--workers", type=positive_int, default=1, metavar="N", help="processes (default 1)")
    add_settings(parser, section)
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
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if isinstance(error, BrokenPipeError) and (not error.filename or is_stdout(Path(error.filename))):
            discard(1)  # sys.stdout may stand for stderr by now
            return 0
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return 2
