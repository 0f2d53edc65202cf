"""Merge a training run's checkpoint, of any parallel layout, into one Hugging Face GPT-2 folder.

    python -m convert.merge_mp --checkpoint results/demo/models/tiny --output results/demo/merged/tiny
    python -m convert.merge_mp --checkpoint results/demo/models/tiny/iter_0000100 --output merged/at-100

--checkpoint is a run (its newest complete checkpoint) or one iter_* folder. The folder holds config.json,
model.safetensors and the tokenizer; `transformers` loads it as GPT2LMHeadModel. It is proved before it appears: logits
computed from its files equal the checkpoint's. No process group, no GPU; memory for two copies of the model.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common import cli
from common.errors import InputError
from common.files import fsync


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty `<folder>.tmp` that becomes `folder` when all went well, in place of an older result.

    Raises InputError rather than replace a folder that is no model folder.
    """
    if folder.exists() and not (folder / "config.json").is_file() and (folder.is_file() or any(folder.iterdir())):
        raise InputError(f"{folder}: exists and is no model folder; choose another --output")
    temporary, old = (folder.with_name(folder.name + suffix) for suffix in (".tmp", ".old"))
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def merge(checkpoint_path: Path, output: Path) -> str:
    """Write and prove the folder; returns one line that says what was done."""
    from convert.proof import prove
    from training import checkpoint, hf
    from training.load import model_from, tokenizer_for

    manifest = checkpoint.at(checkpoint_path)
    model = manifest.run.model
    weights = checkpoint.read_weights(manifest)
    tokenizer = tokenizer_for(model, manifest.tokenize)
    with new_folder(output) as temporary:
        hf.write_folder(temporary, weights, model, tokenizer)
        difference = prove(temporary, model_from(model, weights))
    layout = manifest.run.parallel
    return (
        f"{output}: merged from {manifest.path} (data {layout.data} x tensor {layout.tensor}, iteration "
        f"{manifest.progress.iteration}), vocabulary {model.vocab_size}, "
        f"{'with' if tokenizer else 'without'} tokenizer; logits equal the checkpoint's within {difference:.1e}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("convert.merge_mp", __doc__)
    parser.add_argument("--checkpoint", type=cli.input_path, required=True, metavar="DIR", help="run or iter_* folder")
    parser.add_argument("--output", type=cli.new_folder, required=True, metavar="DIR", help="folder to write")
    arguments = parser.parse_args(argv)
    print(merge(arguments.checkpoint, arguments.output))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
