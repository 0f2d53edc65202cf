"""Types for command-line options that name files and folders, and the checks that they share.

    parser.add_argument("--input", type=shards, nargs="+")
    parser.add_argument("--output", type=output_file)

`check_paths` runs once the whole command line is parsed, before anything is read: it refuses an output that cannot be
written, two outputs that are the same file, and an output that is also an input.
"""

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import Kind, check_outputs, find_inputs, target_of, temporary_of


def _require_text(text: str) -> None:
    if not text:
        raise argparse.ArgumentTypeError("is the empty string; name a path (. is the working folder)")


@dataclass(frozen=True)
class Inputs:
    """Type of an option for input files: a path, a folder or a glob, kept as text."""

    kind: Kind

    def __call__(self, text: str) -> str:
        """Check the text of one argument."""
        _require_text(text)
        return text


def input_path(text: str) -> Path:
    """Type of an option for one input file or folder."""
    _require_text(text)
    return Path(text)


@dataclass(frozen=True)
class _Output:
    """Type of an option for one output file, or for all files whose names start with a prefix."""

    endings: tuple[str, ...] = ("",)

    def __call__(self, text: str) -> Path:
        _require_text(text)
        path = Path(text)
        if text.endswith(("/", "/.")) or path.name in ("", ".."):
            raise argparse.ArgumentTypeError(f"{text}: is a folder; name a file in it")
        return path

    def files(self, path: Path) -> list[Path]:
        """The files that the option writes."""
        return [path.with_name(path.name + ending) for ending in self.endings]


shards, lists, any_files = Inputs("shards"), Inputs("lists"), Inputs("files")
"""Types of options that take paths, folders and globs of documents; of URL lists and texts; of anything else."""
output_file = _Output()
"""Type of an option for one output file."""


def output_prefix(ending: str = "") -> _Output:
    """Type of an option for the PREFIX of a dataset, without the `ending` that the step adds."""
    return _Output(tuple(ending + suffix for suffix in (".bin", ".idx", ".json")))


def output_folder(text: str) -> Path:
    """Type of an option for a folder that files are written to; it may exist."""
    _require_text(text)
    path = Path(text)
    for folder in (path, *path.parents):
        if os.path.lexists(folder):
            if not folder.is_dir():
                raise argparse.ArgumentTypeError(f"{folder}: is not a folder; choose another one")
            break
    return path


def new_folder(text: str) -> Path:
    """Type of an option for a folder that is replaced as a whole, so it must have a name."""
    path = output_folder(text)
    if path.name in ("", ".."):
        raise argparse.ArgumentTypeError(f"{text}: cannot be replaced; name a folder inside it")
    return path


def check_paths(given: Iterable[tuple[Any, Any]]) -> None:
    """Check the (type, value) pairs of all options together. Raises InputError; changes nothing on disk."""
    given = list(given)
    outputs = [path for kind, value in given if isinstance(kind, _Output) for path in kind.files(value)]
    inputs: list[Path] = []
    if any(path.exists() or temporary_of(path).exists() for path in map(target_of, outputs)):  # else it is no input
        inputs = [value for kind, value in given if kind is input_path]
        for kind, value in given:
            inputs += find_inputs(value, kind.kind)[0] if isinstance(kind, Inputs) else []
    check_outputs(outputs, inputs)
