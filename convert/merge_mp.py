"""Merge a GPT-2 checkpoint of any origin and layout into one Hugging Face folder, and prove it.

    python -m convert.merge_mp --checkpoint results/demo/models/tiny --output merged/tiny
    python -m convert.merge_mp --checkpoint megatron/gpt2-345m --output merged/m --dtype bfloat16

Reads checkpoints of this toolkit, Megatron-LM (2019 to 2024), Megatron-core (torch_dist), DeepSpeed
(ZeRO 0 to 3, pipelines), Hugging Face, nanoGPT and llm.c; docs/convert.md has the table. Writes
config.json, model.safetensors (or several with their index), the tokenizer if it is known,
README.md (a model card of what is known), and merge_report.json. The folder appears only after a
proof: a fixed batch gives the same logits in the source's own arithmetic and from the written
files. Exit code 1 if the logits differ.

--force replaces an older result if every file in it was written by this command. Needs no GPU, and
memory for about two copies of the largest tensor.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from common import cli
from common.console import note
from common.errors import InputError
from convert import command
from convert.arguments import Options, options_of
from training.huggingface.origin import first_changed_file

if TYPE_CHECKING:
    from convert.sources.source import Source

DTYPES = ("float32", "bfloat16", "float16")
MAX_SHARD_SIZE = 50 * 10**9  # bytes: transformers' default
_SIZE = TypeAdapter(Annotated[ByteSize, Field(gt=0)])


def merge(
    path: Path,
    output: Path,
    *,
    options: Options | None = None,
    dtype: str | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    force: bool = False,
) -> str:
    """Write and prove the folder; returns a line about it. Raises CheckpointError and ProofError.

    `dtype` is one of DTYPES, or None for the source's own; `max_shard_size` is in bytes.
    """
    from convert.targets import merged
    from training.launch.device import keep_freed_memory

    keep_freed_memory()  # every matrix that is written is allocated as a whole
    source = _open(path, output, options or Options(), force)
    write = partial(merged.write, source, dtype=dtype, max_shard_size=max_shard_size)
    return command.write_folder(source, output, write, partial(_check_older, force))


def _open(path: Path, output: Path, options: Options, force: bool) -> "Source":
    """The source, with a note if its tokenizer is of another kind."""
    from convert.targets.huggingface import check_tokenizer

    source = command.open_source(path, options, output, partial(_check_older, force))
    if remark := check_tokenizer(source):
        note(f"{source.path}: {remark}")
        source = replace(source, notes=(*source.notes, remark))
    return source


def _check_older(force: bool, output: Path, folder: Path) -> None:
    """A `command.CheckOlder`: `force` replaces a folder that has only files of this command."""
    if foreign := first_changed_file(folder):
        raise InputError(
            f"{output / foreign.relative_to(folder)}: not a file that this command wrote; choose another --output, or "
            "move it away"
        )
    if not force and any(folder.iterdir()):
        raise InputError(f"{output}: exists already; --force replaces it")


def parse_size(text: str) -> int:
    """The bytes of `5GB`, `500MB` or `1000`; decimal units, as transformers counts."""
    try:
        return _SIZE.validate_python(text)
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5GB or 500MB") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("convert.merge_mp", __doc__)
    command.add_source(parser)
    command.add_output(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: the source's)")
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=MAX_SHARD_SIZE,
        metavar="SIZE",
        help="largest file, such as 5GB (default: 50GB)",
    )
    parser.add_argument(
        "--tokenizer",
        type=cli.input_path,
        metavar="DIR",
        help="tokenizer of another vocabulary than GPT-2's: folder with tokenizer.json, or vocab.json and merges.txt",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print the layout and the assumptions")
    parser.add_argument("--force", action="store_true", help="replace an older result of this command")
    arguments = parser.parse_args(argv)
    path, output, options, force = arguments.checkpoint, arguments.output, options_of(arguments), arguments.force
    if arguments.dry_run:
        _open(path, output, options, force)
    else:
        how = {"dtype": arguments.dtype, "max_shard_size": arguments.max_shard_size}
        print(merge(path, output, options=options, **how, force=force))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
