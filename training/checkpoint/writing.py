"""Write a checkpoint: complete, or not at all.

A checkpoint is written under a `.tmp` name and renamed after its manifest is on disk.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from common.errors import CheckpointError, ToolkitError
from common.files import write_json, write_text
from common.folders import swap_folder
from common.settings import Experiment, TokenizeSettings
from training.checkpoint.lookup import discard, find_damage
from training.checkpoint.manifest import MANIFEST, Progress, copy_vocabulary, make_manifest
from training.checkpoint.parts import choose_parts, held_part, unpadded_shape, write_index, write_parts
from training.checkpoint.replicas import Replicas
from training.checkpoint.state import Tensors
from training.dataset.blend import Blend
from training.model_folder import checkpoint_folder, checkpoint_folders
from training.parallel.collectives import all_gather, run_on_all_ranks


def write(
    model_folder: Path,
    tensors: Tensors,
    progress: Progress,
    *,
    experiment: Experiment,
    tokenize: TokenizeSettings,
    data: Blend,
    replicas: Replicas,
    copies: Mapping[str, Tensor] | None = None,
    group: Any = None,
    may_write: Callable[[], None] = lambda: None,
    mark: str = "",
) -> Path:
    """Write `tensors`, or their `copies` (`copy_to_cpu`), as a checkpoint (a collective call over `group`).

    Returns the checkpoint's folder; an older checkpoint of the same iteration is replaced. `data` is what the model is
    trained on. With `copies`, `tensors` may be on the meta device.

    Rank 0 calls `may_write` before it writes anything and again before the finished checkpoint gets its name; all
    ranks raise what it raises. Raises CheckpointError on all ranks if a file cannot be written; the unfinished
    checkpoint is removed then, and older ones stay. `mark`, equal on all ranks, is part of the unfinished folder's
    name, so that two jobs never write to the same folder, even if one has lost the run without noticing.
    """
    final = checkpoint_folder(model_folder, progress.iteration)
    temporary = final.with_name(".".join(filter(None, (final.name, mark, "tmp"))))
    rank = dist.get_rank() if dist.is_initialized() else 0

    def prepare() -> None:
        if rank == 0:
            may_write()
            for leftover in model_folder.glob("iter_*.tmp"):  # from a killed save or removal
                discard(leftover)
            temporary.mkdir()

    def publish() -> None:
        if rank == 0:
            may_write()
            kept = copy_vocabulary(model_folder, tokenize)
            files = write_index(temporary, of_ranks)
            manifest = make_manifest(final, progress, experiment, kept, data, replicas, files)
            write_json(temporary / MANIFEST, manifest.model_dump(mode="json"))
            aside = final.with_name(final.name + ".old.tmp")
            swap_folder(temporary, final, aside)
            discard(aside)
            write_text(model_folder / "latest", final.name + "\n")

    def write_own() -> None:
        written.extend(write_parts(temporary, rank, tensors, mine, copies or {}))

    vocab_size = experiment.model.vocab_size
    mine = choose_parts({key: held_part(key, tensor, vocab_size) for key, tensor in tensors.items()}, group)
    shapes = {key: unpadded_shape(key, tensors[key], vocab_size) for key in mine}
    written: list[Any] = []
    error = _error_of(prepare, group) or _error_of(write_own, group)
    if error is None:
        of_ranks = all_gather((shapes, *written), group)
        error = _error_of(publish, group)
    if error is None:
        return final
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    if isinstance(error, ToolkitError):
        raise error
    # another job may have claimed the folder and removed the files
    run_on_all_ranks(lambda: may_write() if rank == 0 else None, group)
    found = all_gather(checkpoint_folders(model_folder), group)[0]
    last = next((folder.name for folder in found if not find_damage(folder, group, content=False)), "none")
    raise CheckpointError(
        f"{final}: not saved: {error.strerror or error} ({error.filename or temporary}); "
        f"the last complete checkpoint is {last}"
    )


def _error_of(action: Callable[[], None], group: Any) -> OSError | ToolkitError | None:
    """Run `action` on every rank; returns the first error that any of them raised (a collective call).

    The error is returned and not raised because only an error that all ranks know of may lead to further collective
    calls.
    """
    try:
        run_on_all_ranks(action, group)
    except (OSError, ToolkitError) as error:
        return error
    return None
