"""Finds a usable checkpoint, checks that it fits the run that resumes from it, and removes one."""

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.console import warn
from common.errors import CheckpointError, CheckpointVersionError, InputError
from common.files.writing import first_foreign_file, remove_own
from common.settings import Experiment
from training.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify
from training.dataset.blend import Blend
from training.model_folder import checkpoint_folders, is_checkpoint_name
from training.parallel.collectives import all_gather, run_on_all_ranks

# files that a save writes; a folder with any other is never removed
_OWN = re.compile(r"rank_\d+_\d+\.safetensors|(tensors|manifest)\.json(\.tmp)?")
_SHOWN = 3  # problems quoted in a message


def find_damage(folder: Path, group: Any = None, *, content: bool = True) -> CheckpointError | None:
    """The damage of a checkpoint in one line; None if it is intact.

    A collective call: the ranks share the reading, and all get the same answer.
    """
    share = slice(dist.get_rank(group), None, dist.get_world_size(group)) if dist.is_initialized() else slice(None)
    try:
        run_on_all_ranks(lambda: verify(read_manifest(folder), share, content=content), group)
    except CheckpointError as error:
        return error
    return None


def newest(model_folder: Path, *, content: bool = True) -> Manifest | None:
    """The newest undamaged checkpoint in a model folder; None if it has no checkpoints.

    A collective call: the ranks share the reading, and all get the same answer. Without `content`,
    only the sizes of files are compared. Warns of each skipped checkpoint. Raises CheckpointError
    if all checkpoints are unusable, or the newest one was written by another version: a run that
    started from an older one would overwrite it.
    """
    problems: list[str] = []
    # rank 0's list: a network file system may show other ranks another state
    for folder in all_gather(checkpoint_folders(model_folder))[0]:
        error = find_damage(folder, content=content)
        if error is None:
            for text in problems if not dist.is_initialized() or dist.get_rank() == 0 else ():
                warn(f"checkpoint skipped: {text}")
            return read_manifest(folder)
        if isinstance(error, CheckpointVersionError):
            raise CheckpointError(f"{error}, or move {folder.name} away to resume from an older checkpoint")
        problems.append(str(error))
    if problems:
        count, shown = len(problems), "; ".join(problems[:_SHOWN] + ["…"] * (len(problems) > _SHOWN))
        raise CheckpointError(
            f"{model_folder}: {count} checkpoint{'s' if count > 1 else ''}, but none of them can be used: {shown}. "
            "Nothing was changed. Restore one from a copy, or use the version of this toolkit that wrote them; to "
            "start from scratch, remove the iter_* folders"
        )
    return None


def resolve(path: Path) -> Manifest:
    """The checkpoint in a checkpoint folder, or the newest undamaged one in a model folder.

    Raises CheckpointError for anything else, Megatron's `mp_rank_*` folders included.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if path.name.startswith("mp_rank_") or next(path.glob("mp_rank_*"), next(path.glob("*/mp_rank_*"), None)):
        raise CheckpointError(
            f"{path}: a Megatron checkpoint (mp_rank_*); merge it first, with python -m convert.merge_mp"
        )
    if is_checkpoint_name(path.name) or (path / MANIFEST).exists():
        manifest = read_manifest(path)
        verify(manifest)
        return manifest
    latest = newest(path)
    if latest is None:
        raise CheckpointError(f"{path}: no checkpoint here (a model folder holds iter_0000100 or the like)")
    return latest


def check_fits(manifest: Manifest, *, name: str, experiment: Experiment, data: Blend | None) -> None:
    """Raise CheckpointError if a checkpoint is of another model or another order of the data.

    `data`: the training part; None before it is made, which compares the settings alone.
    """
    elsewhere = f"train under another name, or move {manifest.path.parent} away to start from scratch"
    # dropout, layout, batch size, learning rate and length may change during a run
    fixed = [("model", key) for key in ("n_layer", "n_head", "n_embd", "seq_len", "vocab_size")]
    for section, key in (*fixed, ("train", "seed"), ("train", "split")):
        saved, wanted = (getattr(getattr(settings, section), key) for settings in (manifest, experiment))
        if saved != wanted:
            raise CheckpointError(
                f"{manifest.path}: models.{name}.{section}.{key} is {wanted} in the configuration, but the "
                f"checkpoint has {saved}; set it back, {elsewhere}"
            )
    before, now = manifest.train.optimizer, experiment.train.optimizer
    if before != now and not (now == "muon" and experiment.train.allow_optimizer_change):
        raise CheckpointError(
            f"{manifest.path}: models.{name}.train.optimizer is {now}, but the checkpoint has the moments of {before}; "
            f"set it back, {'set train.allow_optimizer_change, ' * (now == 'muon')}{elsewhere}"
        )
    if data is None:
        return
    prefixes = " and ".join(str(part.corpus.prefix) for part in data.parts)
    if manifest.data != data.identity:
        blended = " (or with other weights)" if len(data.parts) > 1 else ""
        raise CheckpointError(
            f"{manifest.path}: was trained on another dataset than {prefixes} holds now{blended}; restore it, "
            f"{elsewhere}"
        )
    if manifest.content != data.content:
        raise CheckpointError(
            f"{manifest.path}: was trained on another text than {prefixes} holds now, in documents of the same "
            f"lengths; if workflow.provenance.remove changed it, repeat it with --model {manifest.path.parent}, else "
            f"restore the dataset, {elsewhere}"
        )


def remove(folder: Path) -> None:
    """Rename a checkpoint, then delete it: a kill in between leaves no folder with its name."""
    if foreign := first_foreign_file(folder, _OWN.fullmatch):
        warn(f"{folder}: not removed: {foreign.name} in it does not belong to a checkpoint")
        return
    try:
        discard(condemned := folder.with_name(folder.name + ".tmp"))
        discard(folder.rename(condemned))
    except OSError as error:
        warn(f"{folder}: not removed ({error.strerror})")


def discard(folder: Path) -> None:
    """Remove an unfinished or renamed checkpoint; warns if it holds a file that no save wrote."""
    try:
        remove_own(folder, _OWN.fullmatch)
    except (InputError, OSError) as error:
        warn(f"not removed: {error}")
