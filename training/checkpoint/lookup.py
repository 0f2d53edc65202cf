"""Which checkpoints there are, and which one to go on from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.console import warn
from common.errors import CheckpointError
from common.settings import Experiment
from training.checkpoint import manifest as manifests
from training.checkpoint.manifest import Manifest, read_manifest, verify
from training.checkpoint.versions import OtherVersion
from training.dataset.blend import Blend
from training.model_folder import is_iteration, iterations
from training.parallel.collectives import all_gather

_NAMED = 3  # problems in a message; with more, the first ones


def find_damage(folder: Path, group: Any = None, *, content: bool = True) -> str:
    """What is wrong with a checkpoint, or nothing; ranks share the reading (a collective call, equal on all)."""
    return str(_problem(folder, group, content) or "")


def _problem(folder: Path, group: Any = None, content: bool = True) -> CheckpointError | None:
    problem: CheckpointError | None = None
    try:
        share = slice(dist.get_rank(group), None, dist.get_world_size(group)) if dist.is_initialized() else slice(None)
        verify(read_manifest(folder), share, content=content)
    except CheckpointError as error:
        problem = error
    return next((found for found in all_gather(problem, group) if found is not None), None)


def newest(model_folder: Path) -> Manifest | None:
    """The newest checkpoint of a run that passes `verify`; the ones it passes over are named on stderr.

    A collective call: ranks share the reading and agree on the answer. None where a run has no checkpoint yet. Raises
    CheckpointError where it has some, but none of them can be used, or the newest is another version's: training on
    from less would write over them.
    """
    problems: list[str] = []
    # rank 0's list: a network folder may look different elsewhere
    for folder in all_gather(iterations(model_folder))[0]:
        problem = _problem(folder)
        if problem is None:
            for text in problems if not dist.is_initialized() or dist.get_rank() == 0 else ():
                warn(f"checkpoint passed over: {text}")
            return read_manifest(folder)
        if isinstance(problem, OtherVersion):
            raise CheckpointError(f"{problem}, or move {folder.name} away to go on from an older checkpoint")
        problems.append(str(problem))
    if problems:
        raise CheckpointError(_none_usable(model_folder, problems))
    return None


def _none_usable(model_folder: Path, problems: Sequence[str]) -> str:
    """How many there are, why each is of no use, what to do."""
    count = len(problems)
    told = "; ".join([*problems[:_NAMED], *(["…"] if count > _NAMED else [])])
    return (
        f"{model_folder}: {count} checkpoint{'s' if count > 1 else ''}, but none of them can be used: {told}. Nothing "
        "was changed. Restore one from a copy, or use the version of this toolkit that wrote them; to begin again from "
        "nothing, remove the iter_* folders"
    )


def resolve(path: Path) -> Manifest:
    """The checkpoint that a person means by `path`: an iteration folder, or a run's newest complete one.

    Raises CheckpointError in one line for anything else, Megatron's `mp_rank_*` folders among it.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if path.name.startswith("mp_rank_") or next(path.glob("mp_rank_*"), next(path.glob("*/mp_rank_*"), None)):
        raise CheckpointError(f"{path}: a Megatron checkpoint (mp_rank_*); these are not read yet")
    if is_iteration(path) or (path / manifests.NAME).exists():
        manifest = read_manifest(path)
        verify(manifest)
        return manifest
    found = newest(path)
    if found is None:
        raise CheckpointError(f"{path}: no checkpoint here (a run folder holds iter_0000100 or the like)")
    return found


def check_fits(manifest: Manifest, *, name: str, experiment: Experiment, data: Blend) -> str:
    """CheckpointError when going on from a checkpoint would train another model, or on another order of data.

    Returns a note, empty in most cases, on what could not be compared.
    """
    note = ""
    held = " and ".join(str(part.corpus.prefix) for part in data.parts)
    if manifest.data != data.identity:
        blended = " (or on other weights)" if len(data.parts) > 1 else ""
        raise CheckpointError(
            f"{manifest.path}: was trained on another dataset than {held} holds now{blended}; "
            f"train under another name, or remove {manifest.path.parent} to begin anew"
        )
    if manifest.content is None:
        note = (
            f"{manifest.path} is from before checkpoints knew their text: that {held} still holds the same text was "
            "not checked (the lengths of its documents were)"
        )
    elif manifest.content != data.content:
        raise CheckpointError(
            f"{manifest.path}: was trained on another text than {held} holds now, in documents of the same lengths; "
            f"restore the dataset, train under another name, or remove {manifest.path.parent} to begin anew"
        )
    # What may change in the middle of a run is left out: dropout, layout, batch, learning rate, length.
    fixed = [("model", key) for key in ("n_layer", "n_head", "n_embd", "seq_len", "vocab_size")]
    for section, key in (*fixed, ("train", "seed"), ("train", "split")):
        saved, wanted = (getattr(getattr(settings, section), key) for settings in (manifest.experiment, experiment))
        if saved != wanted:
            raise CheckpointError(
                f"{manifest.path}: models.{name}.{section}.{key} is {wanted} in the configuration, but the "
                f"checkpoint has {saved}; set it back, or train under another name"
            )
    return note
