"""The parser of every command: argparse, with settings as `section.key=value` and checked paths.

The types of options tell whether a path is read or written, so that the parser can check all paths.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from common.console import QUIET
from common.files import Kind, check_outputs, find_inputs, target_of
from common.settings import closest


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
class Inputs:
    """Type of an option for input files: a path, a folder or a glob, kept as text."""

    kind: Kind

    def __call__(self, text: str) -> str:
        """The text. Raises ArgumentTypeError if it is empty."""
        input_path(text)
        return text


@dataclass(frozen=True)
class Output:
    """Type of an option for one output file, or for all files whose names start with a prefix."""

    endings: tuple[str, ...] = ("",)

    def __call__(self, text: str) -> Path:
        """The path. Raises ArgumentTypeError if it names a folder."""
        path = input_path(text)
        if text.endswith(("/", "/.")) or path.name in ("", ".."):
            raise argparse.ArgumentTypeError(f"{text}: is a folder; name a file in it")
        return path


def checkpoint_path(text: str) -> Path:
    """Type of an option for a checkpoint: its folder, or MODEL/best or MODEL/latest."""
    path = input_path(text)
    pointer = path.name in ("best", "latest") and path.is_file()
    return path.with_name(path.read_text().strip()) if pointer else path


shards, lists, any_files = Inputs("shards"), Inputs("lists"), Inputs("files")
"""Types of options for paths, folders, globs: of documents, of URL lists and texts, of others."""
output_file = Output()
"""Type of an option for one output file."""


def output_prefix(ending: str = "") -> Output:
    """Type of an option for the PREFIX of a dataset, without the `ending` that the step adds."""
    return Output(tuple(ending + suffix for suffix in (".bin", ".idx", ".json")))


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


class Parser(argparse.ArgumentParser):
    """argparse with `section.key=value`, checked paths, one-line errors and shell completion."""

    keys: frozenset[str] = frozenset()
    """What an override `section.key=value` may begin with; empty for commands without settings."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.add_argument("--quiet", action="store_true", default=argparse.SUPPRESS, help="show no progress")

    def error(self, message: str) -> NoReturn:
        """Print one line, without argparse's usage block, and exit with code 2."""
        if message.startswith("unrecognized arguments: -"):
            message += closest(message.split()[2], self._option_string_actions)
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; if a shell asks for completions of a command line, print them and exit."""
        if "_ARGCOMPLETE" in os.environ:
            import argcomplete

            argcomplete.autocomplete(self)
        return super().parse_args(args, namespace)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, collect every `section.key=value`, and check the paths."""
        given = list(sys.argv[1:] if args is None else args)
        overrides = [text for text in given if self._is_override(text)]
        namespace, rest = super().parse_known_args([text for text in given if text not in overrides], namespace)
        if self.keys:  # most likely a misspelt section: validation names the closest one
            unknown = [text for text in rest if "=" in text and not text.startswith("-")]
            rest = [text for text in rest if text not in unknown]
            namespace.overrides = [*overrides, *unknown]
        if namespace.__dict__.pop("quiet", False):
            os.environ[QUIET] = "1"  # of the processes that it starts, too
        self._check_paths(namespace)
        return namespace, rest

    def _is_override(self, text: str) -> bool:
        """Whether an argument is `section.key=value` and no file."""
        key, separator, _ = text.partition("=")
        return bool(separator) and key.split(".")[0] in self.keys and not os.path.lexists(text)

    def _check_paths(self, namespace: argparse.Namespace) -> None:
        """Check the paths of all options together, before anything is read.

        Raises InputError for an output that cannot be written, or equals an input or another
        output.
        """
        given = []
        for action in self._actions:
            value = getattr(namespace, action.dest, None)
            given += [(action.type, one) for one in (value if isinstance(value, list) else [value]) if one is not None]
        outputs = [
            path.with_name(path.name + ending)
            for kind, path in given
            if isinstance(kind, Output)
            for ending in kind.endings
        ]
        inputs: list[Path] = []
        if any(target_of(path).exists() for path in outputs):  # else it is no input
            inputs = [value for kind, value in given if kind in (input_path, checkpoint_path)]
            patterns = [(value, kind.kind) for kind, value in given if isinstance(kind, Inputs)]
            inputs += [path for pattern, kind in patterns for path in find_inputs(pattern, kind)[0]]
        check_outputs(outputs, inputs)


def parser(module: str, doc: str | None) -> Parser:
    """A parser for `python -m MODULE` whose help is the module's docstring, examples and all."""
    return Parser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
