"""Which checkpoints are kept, and how the others are removed.

A folder with a file that no save wrote is never removed.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.console import warn
from common.errors import InputError, TrainingError
from common.folders import first_foreign_file, remove_own
from training.checkpoint.lookup import find_damage
from training.model_folder import checkpoint_folders, iteration_of
from training.parallel.collectives import all_gather

_OWN = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|manifest\.json(\.tmp)?")


def prune(
    model_folder: Path,
    keep_last: int,
    keep_every: int,
    verified: set[Path],
    group: Any = None,
    may_write: Callable[[], None] = lambda: None,
) -> None:
    """Remove checkpoints older than the newest `keep_last` undamaged ones (a collective call).

    Checkpoints at multiples of `keep_every` iterations stay. keep_last 0 keeps all; keep_every 0 has no effect.
    Checkpoints in `verified` are not read again; those that are found undamaged are added to it. Nothing more is
    removed once `may_write` raises TrainingError on rank 0, because another job has the folder.
    """
    if not keep_last:
        return
    kept = 0
    for folder in all_gather(checkpoint_folders(model_folder), group)[0]:
        if kept < keep_last:
            if not find_damage(folder, group, content=folder not in verified):
                kept += 1
                verified.add(folder)
        elif not (keep_every and iteration_of(folder) % keep_every == 0):
            verified.discard(folder)
            if not dist.is_initialized() or dist.get_rank() == 0:
                with suppress(TrainingError):
                    may_write()
                    _remove(folder)


def _remove(folder: Path) -> None:
    """Rename a checkpoint, then delete it, so that a kill in between leaves nothing that looks like a checkpoint."""
    condemned = folder.with_name(folder.name + ".tmp")
    if foreign := first_foreign_file(folder, _OWN.fullmatch):
        warn(f"{folder}: not removed: {foreign.name} in it does not belong to a checkpoint")
        return
    try:
        discard(condemned)
        folder.rename(condemned)
        discard(condemned)
    except OSError as error:
        warn(f"{folder}: not removed ({error.strerror})")


def discard(folder: Path) -> None:
    """Remove an unfinished or renamed checkpoint if it exists; warn if it holds a file that no save wrote."""
    try:
        remove_own(folder, _OWN.fullmatch)
    except (InputError, OSError) as error:
        warn(f"not removed: {error}")
