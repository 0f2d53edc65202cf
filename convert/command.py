"""The command around a target: shared options, the source, an output that appears when proved.

    parser = cli.parser("convert.VERB", __doc__)
    command.add_source(parser)
    command.add_output(parser)
    arguments = parser.parse_args(argv)
    source = command.open_source(arguments.checkpoint, options_of(arguments), arguments.output)
    print(command.write_folder(source, arguments.output, write))

`write(folder)` calls the target, and returns a description and the proof.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common import cli
from common.console import note, say
from common.errors import InputError
from common.files.writing import replace_folder
from common.run_card import NAME as CARD
from common.run_card import write_card
from convert.arguments import Options, add_options

if TYPE_CHECKING:
    from convert.proof import Proof
    from convert.sources.source import Source

SOURCE = (
    "run or model folder (its newest checkpoint), MODEL/best, iter_* or DeepSpeed tag folder, Hugging Face folder, or "
    ".bin of llm.c"
)
CheckOlder = Callable[[Path, Path], None]
"""Raises InputError unless `output` may be replaced; the second folder is where its files are."""


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add --checkpoint, and the flags of `Options`."""
    parser.add_argument(
        "--checkpoint", type=cli.checkpoint_path, required=True, metavar="RUN|ITER|TAG_DIR", help=SOURCE
    )
    add_options(parser)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add --output, a folder."""
    parser.add_argument("--output", type=cli.new_folder, required=True, metavar="DIR", help="folder to write")


def refuse_older(output: Path, folder: Path) -> None:
    """The `CheckOlder` of commands without --force: only an empty folder is replaced."""
    if any(folder.iterdir()):
        raise InputError(f"{output}: exists already; choose another --output, or remove it")


def open_source(path: Path, options: Options, output: Path, check_older: CheckOlder = refuse_older) -> "Source":
    """The checkpoint at `path`, announced; InputError first if `output` cannot be written."""
    from convert.sources import find

    _check_output(output, path)
    if output.is_dir():
        check_older(output, output)
    source = find.open_source(path, options)
    announce(source)
    return source


def announce(source: "Source") -> None:
    """Print a line about the source, and its assumptions as notes."""
    say(f"{source.path}: {source.layout}")
    for remark in source.notes:
        note(f"{source.path}: {remark}")


def write_folder(
    source: "Source",
    output: Path,
    write: Callable[[Path], tuple[str, "Proof"]],
    check_older: CheckOlder = refuse_older,
) -> str:
    """Write `output`, which appears after `write` has filled and proved it; returns a line."""
    with replace_folder(output, lambda old: check_older(output, old)) as folder:
        description, proof = write(folder)
        write_card(folder / CARD, inputs=[source.path])
    return f"{output}: {description}; {proof}"


def _check_output(folder: Path, checkpoint: Path) -> None:
    """Raise InputError if replacing `folder` would harm the input or the working directory."""
    target, source = folder.resolve(), checkpoint.resolve()
    if source.is_relative_to(target):
        raise InputError(f"{folder}: would overwrite the input {checkpoint}; choose another --output")
    if folder.is_symlink():
        raise InputError(f"{folder}: a symbolic link; give the folder that it points to as --output")
    if Path.cwd().is_relative_to(target):
        raise InputError(f"{folder}: the working directory is in there; give a new folder as --output")
    if target.is_relative_to(source) and any(path.name.startswith("iter_") for path in (target, *target.parents)):
        raise InputError(f"{folder}: is inside the checkpoint; choose another --output")
