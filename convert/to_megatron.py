"""Write a GPT-2 as a Megatron-LM checkpoint for any number of tensor ranks and pipeline stages.

    python -m convert.to_megatron --checkpoint merged/tiny --output megatron-tp2 --tp 2 --format v3
    python -m convert.to_megatron --checkpoint results/demo/models/tiny --output megatron-td --tp 2 --format torch_dist

--checkpoint is a Hugging Face folder, a run of this toolkit, or anything else that convert.merge_mp reads. --format is
v3 (today's GPTModel, one file per rank: load with --ckpt-format torch --transformer-impl local) or torch_dist (today's
default, for any layout).

Weights are written bit for bit, in the source's type; the embedding is padded to a multiple of 128 x TP rows. There is
no optimizer and no random state: load with --finetune, or --no-load-optim --no-load-rng. --output is a new folder.
Needs no GPU, and memory for a few copies of the largest tensor.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from common import cli
from common.errors import InputError
from common.files.writing import replace_folder
from common.run_card import NAME as CARD
from common.run_card import write_card
from convert import arguments as flags
from convert.arguments import Options, check_output

FORMATS = ("v3", "torch_dist")


def convert(path: Path, output: Path, *, form: str, tp: int, pp: int = 1, options: Options | None = None) -> str:
    """Write and prove the checkpoint; returns one line about what was done."""
    from convert.proof import prove_source
    from convert.sources.find import open_source
    from convert.targets import megatron, torch_dist

    def check(old: Path) -> None:
        if any(old.iterdir()):
            raise InputError(f"{output}: exists already; choose another --output, or remove it")

    check_output(output, path)
    if output.is_dir():
        check(output)
    source = open_source(path, options)
    flags.announce(source)
    write = {"v3": megatron.write_v3, "torch_dist": torch_dist.write}[form]
    with replace_folder(output, check) as temporary:
        write(source, temporary, tp=tp, pp=pp)
        proof = prove_source(source, open_source(temporary))
        files = [path.stat().st_size for path in temporary.rglob("*") if path.is_file()]
        write_card(temporary / CARD, inputs=[source.path])
    return (
        f"{output}: Megatron-LM ({form}), tensor {tp} x pipeline {pp}, {len(files)} files, "
        f"{sum(files) / 1e6:.1f} MB, from {source.path}; logits equal the source's within "
        f"{proof.relative_difference:.1e} of the largest"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("convert.to_megatron", __doc__)
    flags.add_source(parser)
    parser.add_argument("--output", type=cli.new_folder, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--format", choices=FORMATS, required=True, help="version of Megatron-LM that reads it")
    parser.add_argument("--tp", type=cli.positive_int, required=True, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--pp", type=cli.positive_int, default=1, metavar="M", help="pipeline stages (default 1)")
    arguments = parser.parse_args(argv)
    form, tp, pp = arguments.format, arguments.tp, arguments.pp
    print(convert(arguments.checkpoint, arguments.output, form=form, tp=tp, pp=pp, options=flags.options(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
