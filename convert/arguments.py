"""What a checkpoint may not record: settings that a reader needs, and the flags that give them."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from common import cli


@dataclass(frozen=True)
class Options:
    """Settings for checkpoints that do not record them; None: as recorded."""

    num_heads: int | None = None
    qkv_version: int | None = None
    vocab_size: int | None = None
    activation: str | None = None
    tokenizer: Path | None = None
    """Folder of the tokenizer to use instead of the source's own, or of GPT-2's."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `Options` that every command has: all but --tokenizer."""
    parser.add_argument("--num-heads", type=cli.positive_int, metavar="N", help="attention heads, if not recorded")
    parser.add_argument(
        "--qkv-version",
        type=int,
        choices=range(4),
        metavar="V",
        help="order of qkv rows, if not recorded: Megatron's checkpoint_version 0 to 3 (docs/convert.md)",
    )
    parser.add_argument(
        "--vocab-size", type=cli.positive_int, metavar="N", help="tokens without padding, if not recorded"
    )
    forms = ("gelu_new", "gelu")
    parser.add_argument("--activation", choices=forms, help="GELU in its tanh (gelu_new) or erf form (gelu)")


def options_of(arguments: argparse.Namespace) -> Options:
    """The `Options` that the parsed flags give."""
    return Options(**{field.name: getattr(arguments, field.name, None) for field in fields(Options)})
