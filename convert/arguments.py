"""How every command is told its source, and what it says of the source that it found."""

import argparse
from typing import TYPE_CHECKING

from common import cli
from common.console import note, say
from convert.sources.options import Options

if TYPE_CHECKING:
    from convert.sources.source import Source

ACTIVATIONS = ("gelu_new", "gelu")


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add --checkpoint and the flags of `Options`."""
    parser.add_argument(
        "--checkpoint",
        type=cli.input_path,
        required=True,
        metavar="RUN|ITER|TAG_DIR",
        help="run (its newest checkpoint), one iter_* or DeepSpeed tag folder, or a Hugging Face folder",
    )
    parser.add_argument("--iteration", type=cli.positive_int, metavar="N", help="checkpoint in a run (default: newest)")
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
    """The flags that `add_source` added, parsed."""
    return Options(
        iteration=arguments.iteration,
        num_heads=arguments.num_heads,
        qkv_version=arguments.qkv_version,
        vocab_size=arguments.vocab_size,
        activation=arguments.activation,
    )


def announce(source: "Source") -> None:
    """Print what was found in a line, and what was assumed as notes."""
    say(f"{source.path}: {source.layout}")
    for remark in source.notes:
        note(f"{source.path}: {remark}")
