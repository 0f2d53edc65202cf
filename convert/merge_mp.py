"""Merge a checkpoint of any parallel layout into one Hugging Face GPT-2 folder.

    python -m convert.merge_mp --checkpoint results/demo/models/tiny --output merged/tiny
    python -m convert.merge_mp --checkpoint results/demo/models/tiny --iteration 400 --output merged/at-400

--checkpoint is a model folder (its newest complete checkpoint, or the one that --iteration names) or one iter_* folder.
The output folder holds config.json, model.safetensors, the tokenizer if the run has one, and training.json, which says
what the model was trained on; `transformers` loads it as GPT2LMHeadModel. The folder appears only after a proof:
logits computed from its files equal the checkpoint's. --force replaces an older result if every file in it was written
by this command. Needs no process group and no GPU, and memory for two copies of the model.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common import cli
from common.errors import CheckpointError, InputError
from common.folders import replace_folder
from training.huggingface.origin import Origin, first_changed_file
from training.model_folder import checkpoint_folder, checkpoint_folders, iteration_of

if TYPE_CHECKING:
    from training.checkpoint import Manifest


def _check_output(folder: Path, checkpoint: Path, force: bool) -> None:
    """InputError unless `folder` is absent, empty, or with `force` an older result that nobody changed."""
    target = folder.resolve()
    if checkpoint.resolve().is_relative_to(target):
        raise InputError(f"{folder}: would overwrite the input {checkpoint}; choose another --output")
    if folder.is_symlink():
        raise InputError(f"{folder}: a symbolic link; give the folder that it points to as --output")
    if Path.cwd().is_relative_to(target):
        raise InputError(f"{folder}: the working directory is in there; give a new folder as --output")
    if target.is_relative_to(checkpoint.resolve()) and any(
        path.name.startswith("iter_") for path in (target, *target.parents)
    ):
        raise InputError(f"{folder}: is inside the checkpoint; choose another --output")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if foreign := first_changed_file(folder):
        raise _not_ours(foreign)
    if not force:
        raise InputError(f"{folder}: exists already; --force replaces it")


def _not_ours(path: Path) -> InputError:
    return InputError(f"{path}: not a file that this command wrote; choose another --output, or move it away")


def _find_checkpoint(path: Path, iteration: int | None) -> "Manifest":
    """The checkpoint that --checkpoint and --iteration name. Raises CheckpointError."""
    from training import checkpoint

    if iteration is None:
        return checkpoint.resolve(path)
    found = checkpoint_folders(path)
    wanted = checkpoint_folder(path, iteration)
    if wanted not in found:
        existing = ", ".join(str(iteration_of(folder)) for folder in reversed(found))
        raise CheckpointError(
            f"{path}: no checkpoint of iteration {iteration}; "
            + (f"there are {existing}" if existing else "--iteration needs a model folder, which holds iter_* folders")
        )
    return checkpoint.resolve(wanted)


def merge(checkpoint_path: Path, output: Path, *, iteration: int | None = None, force: bool = False) -> str:
    """Write and prove the folder; returns one line about what was done."""
    _check_output(output, checkpoint_path, force)
    from convert.proof import prove
    from training import checkpoint
    from training.huggingface.pretrained import save_pretrained
    from training.inference.load import model_from_weights, tokenizer_for

    def check(old: Path, new: Path) -> None:
        if foreign := first_changed_file(old, successor=new):
            raise _not_ours(output / foreign.name)

    manifest = _find_checkpoint(checkpoint_path, iteration)
    model, progress, layout = manifest.experiment.model, manifest.progress, manifest.experiment.parallel
    weights = checkpoint.load_weights(manifest)
    tokenizer = tokenizer_for(manifest)
    origin = Origin(progress.iteration, progress.consumed_samples, manifest.experiment.train.split, manifest.data)
    with replace_folder(output, check) as temporary:
        save_pretrained(temporary, weights, model, tokenizer, origin)
        difference = prove(temporary, model_from_weights(model, weights))
    return (
        f"{output}: merged from {manifest.path} (data {layout.data} x tensor {layout.tensor}, iteration "
        f"{progress.iteration}), vocabulary {model.vocab_size}, "
        f"{'with' if tokenizer else 'without'} tokenizer; logits equal the checkpoint's within {difference:.1e}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("convert.merge_mp", __doc__)
    parser.add_argument(
        "--checkpoint",
        type=cli.input_path,
        required=True,
        metavar="MODEL_FOLDER_OR_ITER",
        help="model folder or one iter_* folder",
    )
    parser.add_argument(
        "--iteration", type=cli.positive_int, metavar="N", help="checkpoint in a model folder (default: newest)"
    )
    parser.add_argument("--output", type=cli.new_folder, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--force", action="store_true", help="replace an older result of this command")
    arguments = parser.parse_args(argv)
    print(merge(arguments.checkpoint, arguments.output, iteration=arguments.iteration, force=arguments.force))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
