"""Options that the commands share, the line that describes the source, and the check of the output."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import cli
from common.console import note, say
from common.errors import InputError

if TYPE_CHECKING:
    from convert.sources.source import Source

ACTIVATIONS = ("gelu_new", "gelu")
SOURCE = (
    "run or model folder (its newest checkpoint), MODEL/best, iter_* or DeepSpeed tag folder, Hugging Face folder, or "
    ".bin of llm.c"
)


@dataclass(frozen=True)
class Options:
    """Settings for checkpoints that do not record them; None: as recorded."""

    num_heads: int | None = None
    qkv_version: int | None = None
    vocab_size: int | None = None
    activation: str | None = None


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add --checkpoint, and `add_options`."""
    parser.add_argument(
        "--checkpoint", type=cli.checkpoint_path, required=True, metavar="RUN|ITER|TAG_DIR", help=SOURCE
    )
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `Options`."""
    parser.add_argument("--num-heads", type=cli.positive_int, metavar="N", help="attention heads, if not recorded")
    parser.add_argument(
        "--qkv-version",
        type=int,
        choices=range(4),
        metavar="V",
        help="order of qkv rows, if not recorded: Megatron's checkpoint_version 0 to 3 (docs/convert.md)",
    )
    parser.add_argument("--vocab-size", type=cli.positive_int, metavar="N", help="true tokens, if not recorded")
    parser.add_argument("--activation", choices=ACTIVATIONS, help="GELU in its tanh (gelu_new) or erf form (gelu)")


def options(arguments: argparse.Namespace) -> Options:
    """The flags that `add_options` added, parsed."""
    return Options(arguments.num_heads, arguments.qkv_version, arguments.vocab_size, arguments.activation)


def announce(source: "Source") -> None:
    """Print a line about the source, and its assumptions as notes."""
    say(f"{source.path}: {source.layout}")
    for remark in source.notes:
        note(f"{source.path}: {remark}")


def check_output(folder: Path, checkpoint: Path) -> None:
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
