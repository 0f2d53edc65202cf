"""Write a checkpoint: complete, or not at all.

A checkpoint is written under a `.tmp` name and renamed after its manifest is on disk.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from common.errors import CheckpointError, ToolkitError
from common.files import write_json, write_text
from common.folders import swap_folder
from common.settings import Experiment, TokenizeSettings
from training.checkpoint.lookup import find_damage
from training.checkpoint.manifest import MANIFEST, Progress, copy_vocabulary, manifest_content
from training.checkpoint.replicas import Replicas
from training.checkpoint.retention import discard
from training.checkpoint.state import Tensors, unpadded_shape
from training.checkpoint.storage import ThreadedWriter, first_error, without_process_group_warning
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
    files: dict[str, Any] = {}

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
            content = manifest_content(progress, experiment, kept, data, replicas, files)
            write_json(temporary / MANIFEST, content)
            aside = final.with_name(final.name + ".old.tmp")
            swap_folder(temporary, final, aside)
            discard(aside)
            write_text(model_folder / "latest", final.name + "\n")

    error = (
        _error_of(prepare, group)
        or _write_tensors(temporary, tensors, _Planner(copies or {}, experiment.model.vocab_size), files, group)
        or _error_of(publish, group)
    )
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


def _write_tensors(
    folder: Path, tensors: Tensors, planner: "_Planner", files: dict[str, Any], group: Any
) -> OSError | ToolkitError | None:
    """Write the tensors and add all files' manifest entries to `files` (a collective call); see `_error_of`."""
    writer = ThreadedWriter(folder)
    try:
        with without_process_group_warning():
            state_dict_saver.save(
                tensors,
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as failure:
        error = first_error(failure)
        if isinstance(error, OSError):
            return error
        raise error from None

    def hash_metadata() -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            data = (folder / ".metadata").read_bytes()
            writer.files[".metadata"] = {"size": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}

    failed = _error_of(hash_metadata, group)
    if failed is None:
        for entries in all_gather(writer.files, group):
            files.update(sorted(entries.items()))
    return failed


class _Planner(DefaultSavePlanner):
    """Plans with the live tensors, without their vocabulary padding, but writes their copies if there are any."""

    def __init__(self, copies: Mapping[str, Any], vocab_size: int) -> None:
        super().__init__()
        self.copies, self.vocab_size = copies, vocab_size

    def create_local_plan(self) -> SavePlan:
        """What this rank could write (called by DCP, which then has one rank write what several hold)."""
        items = [self._without_padding(item) for item in super().create_local_plan().items]
        self.plan = replace(self.plan, items=[item for item in items if item is not None])
        return self.plan

    def _without_padding(self, item: WriteItem) -> WriteItem | None:
        """The item with its true rows alone; None if it has only padding rows."""
        data, key = item.tensor_data, item.index.fqn
        assert data is not None
        shape = unpadded_shape(key, self.state_dict[key], self.vocab_size)
        if shape == data.size:
            return item
        rows = min(data.chunk.sizes[0], shape[0] - data.chunk.offsets[0])
        chunk = replace(data.chunk, sizes=torch.Size((rows, *data.chunk.sizes[1:])))
        return replace(item, tensor_data=replace(data, chunk=chunk, size=shape)) if rows > 0 else None

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor to write (called by DCP)."""
        tensor = super().resolve_data(write_item)
        assert isinstance(tensor, Tensor) and write_item.tensor_data is not None
        return tensor[: write_item.tensor_data.chunk.sizes[0]] if tensor.dim() else tensor

    def lookup_object(self, index: MetadataIndex) -> Any:
        """This rank's shard of a tensor (called by DCP)."""
        return self.copies[index.fqn] if self.copies else super().lookup_object(index)
