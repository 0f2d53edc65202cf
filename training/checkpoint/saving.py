"""The tensors of a run on their way into a checkpoint and back.

They are `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` and `step`, all with the true vocabulary rows only: padding
belongs to a layout and is rebuilt on load. There is no random state to keep: dropout and data order are pure functions
of seed and position. A checkpoint is written under a `.tmp` name and renamed when its manifest is on disk.
"""

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from common.errors import CheckpointError, ToolkitError
from common.files import fsync, write_json, write_text
from common.settings import Experiment, TokenizeSettings
from training.checkpoint import manifest as manifests
from training.checkpoint.files import Digests, Reader, Writer
from training.checkpoint.lookup import find_damage
from training.checkpoint.manifest import Manifest, Progress, describe, keep_vocabulary
from training.checkpoint.own import discard
from training.checkpoint.replicas import Replicas
from training.dataset.blend import Blend
from training.model import GPT2
from training.model_folder import iteration_folder, iterations
from training.parallel.collectives import all_gather, run_on_all_ranks
from training.parallel.dtensor import copy_shard_, full_tensor, local_shard, true_shape

Parameters = Mapping[str, nn.Parameter]
Tensors = dict[str, Tensor]


def write(
    model_folder: Path,
    tensors: Tensors,
    progress: Progress,
    *,
    experiment: Experiment,
    tokenize: TokenizeSettings,
    data: Blend,
    replicas: Replicas,
    copies: Tensors | None = None,
    group: Any = None,
    may_write: Callable[[], None] = lambda: None,
    mark: str = "",
) -> Path:
    """Write `tensors`, or what `copy_tensors` made of them, as a checkpoint (a collective call over `group`).

    Returns its folder; an older checkpoint of that iteration is replaced.

    `may_write` is called on rank 0 before anything is written and before the finished checkpoint gets its name; what it
    raises is raised on all ranks. Raises CheckpointError on all ranks when the system does not take the files of one.
    Nothing is left of the checkpoint then, and older ones stay. `mark` is equal on all ranks and goes into the name of
    the unfinished folder: two jobs, one of which has lost the run, never write into one.
    """
    final = iteration_folder(model_folder, progress.iteration)
    temporary = final.with_name(".".join(filter(None, (final.name, mark, "tmp"))))
    rank = dist.get_rank() if dist.is_initialized() else 0

    def prepare() -> None:
        if rank == 0:
            may_write()
            for leftover in model_folder.glob("iter_*.tmp"):  # of a save or a removal that was killed
                discard(leftover)
            temporary.mkdir()

    def publish() -> None:
        if rank == 0:
            may_write()
            kept = keep_vocabulary(model_folder, tokenize)
            write_json(temporary / manifests.NAME, describe(progress, experiment, kept, data, replicas, files))
            _replace(temporary, final)
            write_text(model_folder / "latest", final.name + "\n")

    try:
        _agreed(prepare, group)
        files = _write_tensors(temporary, tensors, copies, group)
        _agreed(publish, group)
    except _Refused as refused:  # on all ranks: what fails on one alone must not lead it into other collective calls
        error = refused.error
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, ToolkitError):
            raise error from None
        # another job may have claimed the folder and removed the files
        run_on_all_ranks(lambda: may_write() if rank == 0 else None, group)
        found = all_gather(iterations(model_folder), group)[0]
        last = next((folder.name for folder in found if not find_damage(folder, group, content=False)), "none")
        raise CheckpointError(
            f"{final}: not saved: {error.strerror or error} ({error.filename or temporary}); "
            f"the last complete checkpoint is {last}"
        ) from None
    return final


class _Refused(Exception):
    """An error that all ranks know of."""

    def __init__(self, error: OSError | ToolkitError) -> None:
        self.error = error


def _agreed(action: Callable[[], None], group: Any) -> None:
    """`together`, whose OSError or ToolkitError becomes _Refused."""
    try:
        run_on_all_ranks(action, group)
    except (OSError, ToolkitError) as error:
        raise _Refused(error) from None


def _write_tensors(folder: Path, tensors: Tensors, copies: Tensors | None, group: Any) -> dict[str, Any]:
    """Sizes and hashes of all files, on all ranks (a collective call); _Refused on all when one could not write."""
    writer = Writer(folder)
    try:
        with _without_process_group_warning():
            state_dict_saver.save(
                tensors,
                storage_writer=writer,
                planner=_Planner(copies or {}),
                process_group=group,
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as failure:
        error = _first_error(failure)
        raise (_Refused(error) if isinstance(error, OSError) else error) from None
    metadata = folder / ".metadata"

    def hash_metadata() -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            digests = Digests()
            digests.update(metadata.read_bytes())
            writer.files[metadata.name] = digests.entry()

    _agreed(hash_metadata, group)
    return {name: digest for files in all_gather(writer.files, group) for name, digest in sorted(files.items())}


def _replace(temporary: Path, final: Path) -> None:
    """Give a finished checkpoint its name. One that has it already is moved aside first: it is never half there."""
    aside = final.with_name(final.name + ".old.tmp")
    if final.exists():
        discard(aside)
        final.rename(aside)
    temporary.rename(final)
    fsync(final.parent)
    discard(aside)


class _Planner(DefaultSavePlanner):
    """Plans with tensors, but writes their copies, where there are some."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.copies = copies

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Called by the library for what this rank is to write of a tensor."""
        return self.copies[index.fqn] if self.copies else super().lookup_object(index)


# ------------------------------------------------------------------------------------------------ what is saved


def tensors_of(parameters: Parameters, optimizer: torch.optim.Optimizer, vocab_size: int) -> Tensors:
    """The tensors of a run by their names in a checkpoint (a collective call); they share memory with the run's.

    All but those that carry padding rows in a layout: of these, a rank has some rows of the others.
    """
    tensors = _live_tensors(parameters, optimizer)
    for key, tensor in tensors.items():
        shape = _without_padding(key, tensor, vocab_size)
        if shape != tensor.shape:
            tensors[key] = _spread(full_tensor(tensor)[: shape[0]], tensor)
    return tensors


def copy_tensors(tensors: Tensors, buffers: Tensors) -> None:
    """Copy what this process holds of `tensors` into the CPU's memory, into `buffers` that are made when they lack."""
    device = "cpu"
    for key, tensor in tensors.items():
        mine = local_shard(tensor)
        device = mine.device.type
        if key not in buffers:
            buffers[key] = torch.empty(mine.shape, dtype=mine.dtype, pin_memory=device == "cuda")
        buffers[key].copy_(mine, non_blocking=True)
    if device == "cuda":
        torch.cuda.synchronize()


def _live_tensors(parameters: Parameters, optimizer: torch.optim.Optimizer) -> Tensors:
    """Padding rows still on."""
    tensors: Tensors = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        tensors |= {f"{moment}.{name}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
        tensors["step"] = state["step"]  # equal for all parameters
    return tensors


def _without_padding(key: str, tensor: Tensor, vocab_size: int) -> torch.Size:
    return true_shape(key.partition(".")[2], tensor, vocab_size)


def _spread(whole: Tensor, like: Tensor) -> Tensor:
    """`whole` cut along the last axis of `like`'s mesh, equal along the others: every rank holds some of its rows."""
    if isinstance(like, DTensor):
        placements = [*([Replicate()] * (like.device_mesh.ndim - 1)), Shard(0)]
        return distribute_tensor(whole, like.device_mesh, placements, src_data_rank=None)
    return whole


# ------------------------------------------------------------------------------------------------ reading


def load(manifest: Manifest, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Fill the parameters and moments of this process, in whatever layout, from a checkpoint (a collective call)."""
    live = _live_tensors(parameters, optimizer)
    target = dict(live)
    for key, tensor in live.items():
        shape = _without_padding(key, tensor, manifest.experiment.model.vocab_size)
        if shape != tensor.shape:
            target[key] = _spread(torch.empty(shape, dtype=tensor.dtype, device=tensor.device), tensor)
    _read(manifest, target, alone=not dist.is_initialized())
    for key, tensor in live.items():
        if target[key] is not tensor:
            copy_shard_(tensor, full_tensor(target[key]))
    for parameter in parameters.values():
        optimizer.state[parameter]["step"].copy_(live["step"])


def read_weights(manifest: Manifest) -> dict[str, Tensor]:
    """The whole model of a checkpoint of any layout, in this process alone: {name: float32 tensor}, true vocabulary."""
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in GPT2(manifest.experiment.model).named_parameters()}
    tensors: dict[str, Any] = {f"model.{name}": torch.empty(shape) for name, shape in shapes.items()}
    _read(manifest, tensors, alone=True)
    return {key.removeprefix("model."): tensor for key, tensor in tensors.items()}


def _read(manifest: Manifest, tensors: dict[str, Any], alone: bool) -> None:
    """Fill `tensors`; CheckpointError, on all ranks, when the files are gone or broken since they were verified."""
    try:
        with _without_process_group_warning():
            state_dict_loader.load(tensors, storage_reader=Reader(manifest.path), no_dist=alone)
    except CheckpointException as failure:
        error = _first_error(failure)
        raise CheckpointError(f"{manifest.path}: cannot be read ({str(error) or type(error).__name__})") from error


def _first_error(failure: CheckpointException) -> BaseException:
    """What the library tells all ranks went wrong on some: the system's word before others."""
    errors = [error for error, _ in failure.failures.values()]
    return next((error for error in errors if isinstance(error, OSError)), errors[0])


@contextmanager
def _without_process_group_warning() -> Iterator[None]:
    """The library warns when one process works alone, even when `no_dist` says that it is meant to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
