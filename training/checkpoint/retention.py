"""Which checkpoints of a run are kept."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.console import warn
from common.errors import TrainingError
from training.checkpoint.lookup import find_damage
from training.checkpoint.own import discard, stranger_in
from training.model_folder import iteration_of, iterations
from training.parallel.collectives import all_gather


def prune(
    model_folder: Path,
    keep_last: int,
    keep_every: int,
    sound: set[Path],
    group: Any = None,
    may_write: Callable[[], None] = lambda: None,
) -> None:
    """Remove the checkpoints that are older than the newest `keep_last` complete ones (a collective call).

    Those of iterations that are multiples of `keep_every` stay; 0 keeps all, or none for good. Damaged ones do not
    count. A checkpoint is read through to find that out, but those in `sound` are not; the ones found whole are added.
    Nothing is removed once `may_write` (rank 0) raises TrainingError: the folder is another job's then.
    """
    if not keep_last:
        return
    kept = 0
    for folder in all_gather(iterations(model_folder), group)[0]:
        if kept < keep_last:
            whole = not find_damage(folder, group, content=folder not in sound)
            kept += whole
            sound |= {folder} if whole else set()
        elif not (keep_every and iteration_of(folder) % keep_every == 0):
            sound.discard(folder)
            if not dist.is_initialized() or dist.get_rank() == 0:
                with suppress(TrainingError):
                    may_write()
                    _remove(folder)


def _remove(folder: Path) -> None:
    """Under another name first, so that a kill in the middle leaves nothing that looks like a checkpoint."""
    condemned = folder.with_name(folder.name + ".tmp")
    if stranger := stranger_in(folder):
        warn(f"{folder}: not removed: {stranger.name} in it is no file of a checkpoint")
        return
    try:
        discard(condemned)
        folder.rename(condemned)
        discard(condemned)
    except OSError as error:
        warn(f"{folder}: not removed ({error.strerror})")
