"""What every command shares: its parser, its settings, one-line errors, exit codes and signals.

    parser = cli.parser("corpus.clean", __doc__)             # the module docstring is the help text
    parser.add_argument("--input", type=cli.shards, nargs="+")
    cli.add_settings(parser, "clean")                        # --config FILE, clean.key=value
    arguments = parser.parse_args(argv)                      # checks the paths, too
    settings = cli.read_settings(arguments)
    sys.exit(cli.run(main))

Exit codes: 0 done, 2 bad input (one line on stderr, no traceback), 130 interrupted, 143 and 129 ended by SIGTERM or
SIGHUP. These signals raise an exception, so that temporary files are removed and worker processes end.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from common import job_log
from common.config import TOP_LEVEL, step_settings
from common.console import QUIET, discard, fail
from common.errors import InputError, ToolkitError
from common.files import Kind, check_outputs, find_inputs, shard_paths, target_of
from common.settings import Experiment, Settings, closest


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

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; or, called by a shell for the completion of a command line, print what completes it and exit."""
        if "_ARGCOMPLETE" in os.environ:
            import argcomplete

            argcomplete.autocomplete(self)
        return super().parse_args(args, namespace)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does (verbs, too), collect every `section.key=value`, and check the paths."""
        given = list(sys.argv[1:] if args is None else args)
        overrides = [text for text in given if self._is_override(text)]
        found, rest = super().parse_known_args([text for text in given if text not in overrides], namespace)
        if self.keys:  # most likely a misspelt section: validation names the closest one
            unknown = [text for text in rest if "=" in text and not text.startswith("-")]
            rest = [text for text in rest if text not in unknown]
            found.overrides = [*overrides, *unknown]
        if found.__dict__.pop("quiet", False):
            os.environ[QUIET] = "1"  # of the processes that it starts, too
        _check_paths(self._given(found))
        return found, rest

    def _is_override(self, text: str) -> bool:
        """Whether an argument is `section.key=value` and no file."""
        key, separator, _ = text.partition("=")
        return bool(separator) and key.split(".")[0] in self.keys and not os.path.lexists(text)

    def _given(self, found: argparse.Namespace) -> list[tuple[Any, Any]]:
        """(type, value) of each argument that was given."""
        given = []
        for action in self._actions:
            value = getattr(found, action.dest, None)
            values = value if isinstance(value, list) else [value]
            given += [(action.type, one) for one in values if one is not None]
        return given


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m MODULE` whose help is the module's docstring, examples and all."""
    return _Parser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


# -------------------------------------------------------------------------------------------- types of options


def positive_int(text: str) -> int:
    """Type of an option that counts something: 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def input_path(text: str) -> Path:
    """Type of an option for one input file or folder."""
    if not text:
        raise argparse.ArgumentTypeError("is the empty string; name a path (. is the working folder)")
    return Path(text)


@dataclass(frozen=True)
class _Inputs:
    """Type of an option for input files: a path, a folder or a glob, kept as text."""

    kind: Kind

    def __call__(self, text: str) -> str:
        input_path(text)
        return text


@dataclass(frozen=True)
class _Output:
    """Type of an option for one output file, or for all files whose names start with a prefix."""

    endings: tuple[str, ...] = ("",)

    def __call__(self, text: str) -> Path:
        path = input_path(text)
        if text.endswith(("/", "/.")) or path.name in ("", ".."):
            raise argparse.ArgumentTypeError(f"{text}: is a folder; name a file in it")
        return path


def checkpoint_path(text: str) -> Path:
    """Type of an option for one checkpoint: a folder, or a file that names one beside it (MODEL/best, MODEL/latest)."""
    path = input_path(text)
    pointer = path.name in ("best", "latest") and path.is_file()
    return path.with_name(path.read_text().strip()) if pointer else path


shards, lists, any_files = _Inputs("shards"), _Inputs("lists"), _Inputs("files")
"""Types of options that take paths, folders and globs of documents; of URL lists and texts; of anything else."""
output_file = _Output()
"""Type of an option for one output file."""


def output_prefix(ending: str = "") -> _Output:
    """Type of an option for the PREFIX of a dataset, without the `ending` that the step adds."""
    return _Output(tuple(ending + suffix for suffix in (".bin", ".idx", ".json")))


def output_folder(text: str) -> Path:
    """Type of an option for a folder that files are written to; it may exist."""
    path = input_path(text)
    for folder in (path, *path.parents):
        if os.path.lexists(folder) and not folder.is_dir():
            raise argparse.ArgumentTypeError(f"{folder}: is not a folder; choose another one")
    return path


def new_folder(text: str) -> Path:
    """Type of an option for a folder that is replaced as a whole, so it must have a name."""
    path = output_folder(text)
    if path.name in ("", ".."):
        raise argparse.ArgumentTypeError(f"{text}: cannot be replaced; name a folder inside it")
    return path


def _check_paths(given: Iterable[tuple[Any, Any]]) -> None:
    """Check the (type, value) pairs of all options together, before anything is read.

    Raises InputError for an output that cannot be written, equals another output, or would overwrite an input.
    """
    outputs: list[Path] = []
    for kind, path in given:
        if isinstance(kind, _Output):
            outputs += [path.with_name(path.name + ending) for ending in kind.endings]
    inputs: list[Path] = []
    if any(target_of(path).exists() for path in outputs):  # else it is no input
        inputs = [value for kind, value in given if kind in (input_path, checkpoint_path)]
        for kind, value in given:
            inputs += find_inputs(value, kind.kind)[0] if isinstance(kind, _Inputs) else []
    check_outputs(outputs, inputs)


# -------------------------------------------------------------------------------------------- options


def add_settings(parser: argparse.ArgumentParser, section: str = "") -> None:
    """Add `--config FILE`, and accept `section.key=value` anywhere among the arguments; see `read_settings`."""
    assert isinstance(parser, _Parser)
    parser.keys = frozenset(Settings.model_fields)
    used = f", of which this command uses the section {section}" if section else ""
    key = f"{section or 'section'}.key=value replaces one key"
    parser.add_argument("--config", type=input_path, metavar="FILE", help=f"configuration file{used}; {key}")


def add_model_settings(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add `--config FILE --model NAME`, and accept `section.key=value` for that model; see `add_settings`."""
    assert isinstance(parser, _Parser)
    parser.keys = frozenset(Experiment.model_fields) | TOP_LEVEL
    parser.add_argument("--config", type=input_path, required=required, metavar="FILE", help="configuration")
    parser.add_argument(
        "--model",
        required=required,
        metavar="NAME",
        help="name of a model under models: in the configuration; section.key=value replaces one of its keys, "
        "cluster.key=value or run=FOLDER one outside models:",
    )
    if required:
        given = "leave NAME alone: its settings, for a model of this name"
        parser.add_argument("--name", dest="new_model", metavar="NEW", help=given)


def read_settings(arguments: argparse.Namespace) -> Settings:
    """The settings of `--config` and the overrides, validated together; with --name, `model` becomes the new name.

    Raises ConfigError.
    """
    model, name = getattr(arguments, "model", None), getattr(arguments, "new_model", None)
    settings = step_settings(arguments.config, arguments.overrides, model, name)
    if name is not None:
        arguments.model = name
    return settings


def add_input(parser: argparse.ArgumentParser, kind: _Inputs = shards, *, required: bool = True) -> None:
    """Add `--input` for shards of documents, or for lists."""
    parser.add_argument(
        "--input", type=kind, nargs="+", required=required, metavar="PATH", help="files, folders, globs"
    )


def add_known(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add `--known` for what earlier runs have read."""
    parser.add_argument("--known", type=input_path, nargs="+", default=[], metavar="PATH", help=meaning)


def add_removed(parser: argparse.ArgumentParser) -> None:
    """Add `--removed` for files of ids that `common.files.removed_ids` reads."""
    meaning = "ids of documents to drop as `removed`, such as the takedown/ids.txt of a run; a file need not exist"
    parser.add_argument("--removed", type=Path, nargs="+", default=[], metavar="FILE", help=meaning)


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


# -------------------------------------------------------------------------------------------- running


def refuse_other_copy(folder: Path) -> None:
    """Raise InputError if a folder holds another copy of the toolkit than this one.

    `snakemake` and `urls-to-gpt2` run the installed copy, but their jobs, `python -m …`, that of the working folder.
    """
    ours, other = Path(__file__).resolve().parents[1], folder.resolve()
    if other != ours and all((other / name).is_file() for name in ("common/cli.py", "corpus/runner.py")):
        raise InputError(
            f"{other}: holds another copy of the toolkit than {ours}, which runs; use one of them: "
            f"pip install -e {other}, or work in a folder of your own (urls-to-gpt2 init)"
        )


def run(main: Callable[[], int], signals: bool = True) -> int:
    """Call `main` and return its exit code; errors that a user can cure become one line and exit code 2.

    SIGTERM and SIGHUP raise an exception inside `main`, unless `signals` is False or they are handled or ignored
    already (submitit, nohup).
    """
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
    """Raise SystemExit for SIGTERM and SIGHUP if `enabled`; yields a list of the signal that was received."""
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
