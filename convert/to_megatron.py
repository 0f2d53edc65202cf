"""Write a GPT-2 as a Megatron-LM checkpoint for any number of tensor ranks and pipeline stages.

    python -m convert.to_megatron --checkpoint merged/tiny --output megatron-tp2 --tp 2 --format v3
    python -m convert.to_megatron --checkpoint merged/tiny --output td --tp 2 --format torch_dist

--checkpoint is a Hugging Face folder, a run of this toolkit, or anything else that convert.merge_mp
reads. --format is v3 (today's GPTModel, one file per rank: load with --ckpt-format torch
--transformer-impl local) or torch_dist (today's default, for any layout).

Weights are written bit for bit, in the source's type; the embedding is padded to a multiple of 128
x TP rows. Optimizer and random state are not written: load with --finetune, or --no-load-optim
--no-load-rng. --output is a new folder. Needs no GPU, and memory for a few copies of the largest
tensor.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common import cli
from common.console import note
from convert import command
from convert.arguments import options_of

if TYPE_CHECKING:
    from convert.proof import Proof


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("convert.to_megatron", __doc__)
    command.add_source(parser)
    command.add_output(parser)
    formats = ("v3", "torch_dist")
    parser.add_argument("--format", choices=formats, required=True, help="version of Megatron-LM that reads it")
    parser.add_argument("--tp", type=cli.positive_int, required=True, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--pp", type=cli.positive_int, default=1, metavar="M", help="pipeline stages (default 1)")
    arguments = parser.parse_args(argv)
    source = command.open_source(arguments.checkpoint, options_of(arguments), arguments.output)
    form, tp, pp = arguments.format, arguments.tp, arguments.pp
    if source.model.activation == "gelu":
        note("Megatron-LM's default is the tanh form of GELU: train this model with --no-bias-gelu-fusion")

    def write(folder: Path) -> tuple[str, "Proof"]:
        from convert.proof import prove_source
        from convert.sources.find import open_source
        from convert.targets import megatron, torch_dist

        {"v3": megatron.write_v3, "torch_dist": torch_dist.write}[form](source, folder, tp=tp, pp=pp)
        files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        size = f"{len(files)} files, {sum(files) / 1e6:.1f} MB"
        description = f"Megatron-LM ({form}), tensor {tp} x pipeline {pp}, {size}, from {source.path}"
        return description, prove_source(source, open_source(folder))

    print(command.write_folder(source, arguments.output, write))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
