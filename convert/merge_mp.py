"""Merge a training run's checkpoint, of any parallel layout, into one Hugging Face GPT-2 folder.

    python -m convert.merge_mp --checkpoint results/demo/models/tiny --output merged/tiny
    python -m convert.merge_mp --checkpoint results/demo/models/tiny --iteration 400 --output merged/at-400

--checkpoint is a run (its newest complete checkpoint, or that of --iteration) or one iter_* folder. The folder holds
config.json, model.safetensors, the tokenizer where the run has one, and training.json, which says what the model was
trained on; `transformers` loads it as GPT2LMHeadModel. It is proved before it appears: logits computed from its files
equal the checkpoint's. --force replaces an older result, if every file in it is as this command wrote it. No process
group, no GPU; memory for two copies of the model.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import escape as glob_escape
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from common import cli
from common.console import note
from common.errors import CheckpointError, InputError
from common.files import fsync
from training.huggingface import origin as hf_origin

if TYPE_CHECKING:
    from training.checkpoint import Manifest


def check_output(folder: Path, checkpoint: Path, force: bool) -> None:
    """InputError unless `folder` is free: absent, empty, or, with `force`, an older result of ours and nothing else."""
    if folder.is_symlink():
        raise InputError(f"{folder}: a symbolic link; give the folder that it points to as --output")
    if Path.cwd().is_relative_to(folder.resolve()):
        raise InputError(f"{folder}: the working directory is in there; give a new folder as --output")
    if checkpoint.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{folder}: holds the checkpoint; choose another --output")
    inside = folder.resolve().is_relative_to(checkpoint.resolve())
    if inside and any(path.name.startswith("iter_") for path in (folder.resolve(), *folder.resolve().parents)):
        raise InputError(f"{folder}: is inside the checkpoint; choose another --output")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if stranger := hf_origin.stranger(folder):
        raise InputError(f"{stranger}: not a file that this command wrote; choose another --output, or move it away")
    if not force:
        raise InputError(f"{folder}: exists already; --force replaces it")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder` when all went well, in place of an older result of ours.

    Everything happens in a folder of our own beside it, whose name nobody can foresee. Raises InputError, with `folder`
    as it was, when a file in it is not as we wrote it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"{folder.name[:100]}.partial-"
    for leftover in folder.parent.glob(f"{glob_escape(prefix)}*"):
        note(f"{leftover}: left by a merge that was killed, or is still running")
    work = Path(mkdtemp(prefix=prefix, dir=folder.parent))
    new, old = work / "new", work / "old"
    try:
        new.mkdir()
        yield new
        for path in new.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(old)
        try:
            if old.exists() and (stranger := hf_origin.stranger(old, successor=new)):
                raise InputError(
                    f"{folder / stranger.name}: not a file that this command wrote; choose another --output, or move "
                    "it away"
                )
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
        fsync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)  # every file in it is ours: see above
    finally:
        shutil.rmtree(new, ignore_errors=True)  # made above
        with suppress(OSError):  # an older result that could not be put back stays
            work.rmdir()


def find_checkpoint(path: Path, iteration: int | None) -> "Manifest":
    """The checkpoint that --checkpoint and --iteration mean. Raises CheckpointError."""
    from training import checkpoint

    if iteration is None:
        return checkpoint.resolve(path)
    found = checkpoint.iterations(path)
    wanted = checkpoint.iteration_folder(path, iteration)
    if wanted not in found:
        there = ", ".join(str(int(folder.name.removeprefix("iter_"))) for folder in reversed(found))
        raise CheckpointError(
            f"{path}: no checkpoint of iteration {iteration}; "
            + (f"there are {there}" if there else "--iteration needs a run folder, with iter_0000100 or the like in it")
        )
    return checkpoint.resolve(wanted)


def merge(checkpoint_path: Path, output: Path, *, iteration: int | None = None, force: bool = False) -> str:
    """Write and prove the folder; returns one line that says what was done."""
    check_output(output, checkpoint_path, force)
    from convert.proof import prove
    from training import checkpoint
    from training.huggingface import folder as hf
    from training.inference.load import model_from, tokenizer_for

    manifest = find_checkpoint(checkpoint_path, iteration)
    model = manifest.experiment.model
    weights = checkpoint.read_weights(manifest)
    tokenizer = tokenizer_for(manifest)
    origin = hf_origin.Origin(
        manifest.progress.iteration, manifest.progress.consumed_samples, manifest.experiment.train.split, manifest.data
    )
    with new_folder(output) as temporary:
        hf.write_folder(temporary, weights, model, tokenizer, origin)
        difference = prove(temporary, model_from(model, weights))
    layout = manifest.experiment.parallel
    return (
        f"{output}: merged from {manifest.path} (data {layout.data} x tensor {layout.tensor}, iteration "
        f"{manifest.progress.iteration}), vocabulary {model.vocab_size}, "
        f"{'with' if tokenizer else 'without'} tokenizer; logits equal the checkpoint's within {difference:.1e}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("convert.merge_mp", __doc__)
    parser.add_argument("--checkpoint", type=cli.input_path, required=True, metavar="DIR", help="run or iter_* folder")
    parser.add_argument("--iteration", type=cli.positive_int, metavar="N", help="checkpoint of a run (default: newest)")
    parser.add_argument("--output", type=cli.new_folder, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--force", action="store_true", help="replace an older result of this command")
    arguments = parser.parse_args(argv)
    print(merge(arguments.checkpoint, arguments.output, iteration=arguments.iteration, force=arguments.force))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
