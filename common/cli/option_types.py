"""The argparse types of options, which say whether a path is read or written, and the check of all paths together."""

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import Kind, check_outputs, find_inputs, target_of


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
    """Type of an option for one checkpoint: a folder, or a file that names one beside it (MODEL/best, MODEL/latest)."""
    path = input_path(text)
    pointer = path.name in ("best", "latest") and path.is_file()
    return path.with_name(path.read_text().strip()) if pointer else path


shards, lists, any_files = Inputs("shards"), Inputs("lists"), Inputs("files")
"""Types of options that take paths, folders and globs of documents; of URL lists and texts; of all other files."""
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


def check_paths(given: Iterable[tuple[Any, Any]]) -> None:
    """Check the (type, value) pairs of all options together, before anything is read.

    Raises InputError for an output that cannot be written, equals another output, or would overwrite an input.
    """
    outputs: list[Path] = []
    for kind, path in given:
        if isinstance(kind, Output):
            outputs += [path.with_name(path.name + ending) for ending in kind.endings]
    inputs: list[Path] = []
    if any(target_of(path).exists() for path in outputs):  # else it is no input
        inputs = [value for kind, value in given if kind in (input_path, checkpoint_path)]
        for kind, value in given:
            inputs += find_inputs(value, kind.kind)[0] if isinstance(kind, Inputs) else []
    check_outputs(outputs, inputs)
