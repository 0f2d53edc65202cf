"""Find a checkpoint that can be used, and check that it fits the run that resumes from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.console import warn
from common.errors import CheckpointError, CheckpointVersionError
from common.rule_keys import TRAIN_RUNNING
from common.settings import Experiment
from training.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify
from training.dataset.blend import Blend
from training.model_folder import checkpoint_folders, is_checkpoint_name
from training.parallel.collectives import all_gather

_SHOWN = 3  # problems quoted in a message


def find_damage(folder: Path, group: Any = None, *, content: bool = True) -> str:
    """What is wrong with a checkpoint; empty if nothing is.

    A collective call: the ranks share the reading, and all get the same answer.
    """
    return str(_find_error(folder, group, content) or "")


def _find_error(folder: Path, group: Any = None, content: bool = True) -> CheckpointError | None:
    error: CheckpointError | None = None
    try:
        share = slice(dist.get_rank(group), None, dist.get_world_size(group)) if dist.is_initialized() else slice(None)
        verify(read_manifest(folder), share, content=content)
    except CheckpointError as found:
        error = found
    return next((found for found in all_gather(error, group) if found is not None), None)


def newest(model_folder: Path) -> Manifest | None:
    """The newest undamaged checkpoint in a model folder; None if it has no checkpoints.

    A collective call: the ranks share the reading, and all get the same answer. Prints a warning for each checkpoint
    that is skipped. Raises CheckpointError if all checkpoints are unusable, or if the newest was written by another
    version: a run that started from less would overwrite them.
    """
    problems: list[str] = []
    # rank 0's list: a network file system may show other ranks another state
    for folder in all_gather(checkpoint_folders(model_folder))[0]:
        error = _find_error(folder)
        if error is None:
            for text in problems if not dist.is_initialized() or dist.get_rank() == 0 else ():
                warn(f"checkpoint skipped: {text}")
            return read_manifest(folder)
        if isinstance(error, CheckpointVersionError):
            raise CheckpointError(f"{error}, or move {folder.name} away to resume from an older checkpoint")
        problems.append(str(error))
    if problems:
        raise CheckpointError(_none_usable(model_folder, problems))
    return None


def _none_usable(model_folder: Path, problems: Sequence[str]) -> str:
    count = len(problems)
    shown = "; ".join([*problems[:_SHOWN], *(["…"] if count > _SHOWN else [])])
    return (
        f"{model_folder}: {count} checkpoint{'s' if count > 1 else ''}, but none of them can be used: {shown}. Nothing "
        "was changed. Restore one from a copy, or use the version of this toolkit that wrote them; to start from "
        "scratch, remove the iter_* folders"
    )


def resolve(path: Path) -> Manifest:
    """The checkpoint in `path`: a checkpoint folder, or a model folder, whose newest undamaged checkpoint is used.

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
    found = newest(path)
    if found is None:
        raise CheckpointError(f"{path}: no checkpoint here (a model folder holds iter_0000100 or the like)")
    return found


def check_fits(manifest: Manifest, *, name: str, experiment: Experiment, data: Blend) -> str:
    """Check that a checkpoint can be resumed with the settings of the model `name` and its training data.

    Returns a note, usually empty, about what could not be compared. Raises CheckpointError if the checkpoint belongs to
    another model or another order of data.
    """
    note = ""
    prefixes = " and ".join(str(part.corpus.prefix) for part in data.parts)
    if manifest.data != data.identity:
        blended = " (or with other weights)" if len(data.parts) > 1 else ""
        raise CheckpointError(
            f"{manifest.path}: was trained on another dataset than {prefixes} holds now{blended}; "
            f"train under another name, or remove {manifest.path.parent} to start from scratch"
        )
    if manifest.content is None:
        note = (
            f"{manifest.path} is from before checkpoints recorded a hash of their text: the documents of {prefixes} "
            "have the same lengths, but their text was not compared"
        )
    elif manifest.content != data.content:
        raise CheckpointError(
            f"{manifest.path}: was trained on another text than {prefixes} holds now, in documents of the same "
            "lengths; restore the dataset, train under another name, or remove "
            f"{manifest.path.parent} to start from scratch"
        )
    # dropout, layout, batch size, learning rate and length may change during a run
    fixed = [("model", key) for key in ("n_layer", "n_head", "n_embd", "seq_len", "vocab_size")]
    for section, key in (*fixed, ("train", "seed"), ("train", "split")):
        saved, wanted = (getattr(getattr(settings, section), key) for settings in (manifest.experiment, experiment))
        if saved != wanted:
            raise CheckpointError(
                f"{manifest.path}: models.{name}.{section}.{key} is {wanted} in the configuration, but the "
                f"checkpoint has {saved}; set it back, or train under another name"
            )
    return note


def changed_keys(before: Experiment, now: Experiment) -> str:
    """`model.dropout 0.1 -> 0.0, train.lr 0.01 -> 0.02`: what a resumed run computes otherwise than its checkpoint."""
    changes = [
        f"{section}.{key} {value} -> {wanted}"
        for section, running in (("model", set[str]()), ("train", TRAIN_RUNNING))
        for key, wanted in getattr(now, section).model_dump(mode="json", exclude=running).items()  # as in a manifest
        if (value := getattr(getattr(before, section), key)) != wanted
    ]
    return ", ".join(changes)
