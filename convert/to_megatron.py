"""Write a GPT-2 as a Megatron-LM checkpoint for any number of tensor ranks and pipeline stages.

    python -m convert.to_megatron --checkpoint merged/tiny --output megatron-tp2 --tp 2 --format v3
    python -m convert.to_megatron --checkpoint results/demo/models/tiny --output megatron-td --tp 2 --format torch_dist

--checkpoint is a Hugging Face folder, a run of this toolkit, or anything else that convert.merge_mp reads. --format is
2019 (the first public Megatron-LM and its forks: names without version, no pipeline), v3 (today's GPTModel, one file
per rank: load with --ckpt-format torch --transformer-impl local) or torch_dist (today's default, for any layout).

Weights are written bit for bit, in the source's type; the embedding is padded to a multiple of 128 x TP rows. There is
no optimizer and no random state: load with --finetune, or --no-load-optim --no-load-rng. --force replaces an older
result if every file in it was written by this command. Needs no GPU, and memory for a few copies of the largest tensor.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from common import cli
from common.console import note
from common.errors import InputError
from common.files import read_json, write_json
from common.folders import replace_folder
from common.run_card import NAME as CARD
from common.run_card import write_card
from convert import arguments as flags
from convert.arguments import Options, check_older, check_output

if TYPE_CHECKING:
    from convert.sources.source import Source

FORMATS = ("2019", "v3", "torch_dist")
_RECORD = "converted.json"


def convert(
    path: Path, output: Path, *, form: str, tp: int, pp: int = 1, options: Options | None = None, force: bool = False
) -> str:
    """Write and prove the checkpoint; returns one line about what was done."""
    from convert.proof import prove_source
    from convert.sources.find import open_source

    check_output(output, path, _first_foreign, force)
    source = open_source(path, options)
    flags.announce(source)

    def check(old: Path, new: Path) -> None:
        check_older(output, old, _first_foreign(old), force)

    with replace_folder(output, check) as temporary:
        _writer(form)(source, temporary, tp=tp, pp=pp)
        model = source.model
        found = open_source(temporary, Options(num_heads=model.n_head, vocab_size=model.vocab_size))
        proof = prove_source(source, found)
        write_card(temporary / CARD, inputs=[source.path])
        files = {name: (temporary / name).stat().st_size for name in _files(temporary)}
        write_json(temporary / _RECORD, {"format": form, "tensor": tp, "pipeline": pp, "files": files})
    if form == "2019" and (needed := _flags_to_read(source)):
        note(f"{output}: the 2019 format does not record everything; read it with {needed}")
    return (
        f"{output}: Megatron-LM ({form}), tensor {tp} x pipeline {pp}, {len(files)} files, "
        f"{sum(files.values()) / 1e6:.1f} MB, from {source.path}; logits equal the source's within "
        f"{proof.relative_difference:.1e} of the largest"
    )


def _writer(form: str) -> "Callable[..., None]":
    """`write(source, folder, *, tp, pp)` of a format."""
    module, name = {
        "2019": ("megatron", "write_2019"),
        "v3": ("megatron", "write_v3"),
        "torch_dist": ("torch_dist", "write"),
    }[form]
    write: Callable[..., None] = getattr(import_module(f"convert.targets.{module}"), name)
    return write


def _files(folder: Path) -> list[str]:
    """The files in and below a folder, by their path in it, sorted; links to folders count as files."""
    found = []
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        found += [str((Path(parent) / name).relative_to(folder)) for name in (*names, *links)]
    return sorted(found)


def _first_foreign(folder: Path) -> Path | None:
    """The first file, by name, that this command did not write or that was changed; None if all are its own."""
    try:
        known = read_json(folder / _RECORD)["files"].items()
    except (InputError, OSError, TypeError, KeyError, AttributeError):
        known = ()
    sizes = dict(known)
    for name in _files(folder):
        path = folder / name
        if name == _RECORD and sizes:
            continue
        if path.is_symlink() or not path.is_file() or path.stat().st_size != sizes.get(name):
            return path
    return None


def _flags_to_read(source: "Source") -> str:
    """The flags that convert.merge_mp needs for a 2019 file of this model."""
    from convert.sources.ranks import GPT2_VOCABULARY, HEAD_SIZE  # what readers of such a file assume

    model, needed = source.model, []
    if model.n_head * HEAD_SIZE != model.n_embd:
        needed.append(f"--num-heads {model.n_head}")
    if model.vocab_size != GPT2_VOCABULARY:
        needed.append(f"--vocab-size {model.vocab_size}")
    return " ".join(needed)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("convert.to_megatron", __doc__)
    flags.add_source(parser)
    parser.add_argument("--output", type=cli.new_folder, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--format", choices=FORMATS, required=True, help="version of Megatron-LM that reads it")
    parser.add_argument("--tp", type=cli.positive_int, required=True, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--pp", type=cli.positive_int, default=1, metavar="M", help="pipeline stages (default 1)")
    parser.add_argument("--force", action="store_true", help="replace an older result of this command")
    arguments = parser.parse_args(argv)
    print(
        convert(
            arguments.checkpoint,
            arguments.output,
            form=arguments.format,
            tp=arguments.tp,
            pp=arguments.pp,
            options=flags.options(arguments),
            force=arguments.force,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
