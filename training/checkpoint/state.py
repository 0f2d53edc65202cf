"""The tensors of a training run as a checkpoint holds them, and how they are loaded into any layout.

They are `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` and `step`, with the true vocabulary rows only: padding belongs
to a layout and is rebuilt on load. There is no random state to save: dropout and data order are pure functions of the
seed and the position in the run.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from common.errors import CheckpointError
from training.checkpoint.manifest import Manifest
from training.checkpoint.storage import ThreadedReader, first_error, without_process_group_warning
from training.model import GPT2
from training.parallel.collectives import run_on_all_ranks
from training.parallel.dtensor import copy_shard_, full_tensor, local_shard, true_shape

Parameters = Mapping[str, nn.Parameter]
Tensors = dict[str, Tensor]


def state_tensors(parameters: Parameters, optimizer: torch.optim.Optimizer, vocab_size: int) -> Tensors:
    """The parameters and optimiser state by their names in a checkpoint (a collective call).

    Vocabulary tensors are re-sharded without padding; all others alias live memory.
    """
    tensors = _live_tensors(parameters, optimizer)
    for key, tensor in tensors.items():
        shape = _unpadded_shape(key, tensor, vocab_size)
        if shape != tensor.shape:
            tensors[key] = _shard_rows(full_tensor(tensor)[: shape[0]], tensor)
    return tensors


def copy_to_cpu(tensors: Tensors, buffers: Tensors) -> None:
    """Copy this rank's shards of `tensors` into CPU `buffers`, which are allocated on the first call."""
    device = "cpu"
    for key, tensor in tensors.items():
        shard = local_shard(tensor)
        device = shard.device.type
        if key not in buffers:
            buffers[key] = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=device == "cuda")
        buffers[key].copy_(shard, non_blocking=True)
    if device == "cuda":
        torch.cuda.synchronize()


def _live_tensors(parameters: Parameters, optimizer: torch.optim.Optimizer) -> Tensors:
    """All tensors by name, vocabulary padding included."""
    tensors: Tensors = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        tensors |= {f"{moment}.{name}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
        tensors["step"] = state["step"]  # equal for all parameters
    return tensors


def _unpadded_shape(key: str, tensor: Tensor, vocab_size: int) -> torch.Size:
    return true_shape(key.partition(".")[2], tensor, vocab_size)


def _shard_rows(whole: Tensor, like: Tensor) -> Tensor:
    """Shard the rows of `whole` over the last axis of `like`'s mesh, replicated over the other axes."""
    if isinstance(like, DTensor):
        placements = [*([Replicate()] * (like.device_mesh.ndim - 1)), Shard(0)]
        return distribute_tensor(whole, like.device_mesh, placements, src_data_rank=None)
    return whole


def load(manifest: Manifest, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint into this rank's parameters and optimiser state, in any layout (a collective call)."""
    live = _live_tensors(parameters, optimizer)
    target = dict(live)
    for key, tensor in live.items():
        shape = _unpadded_shape(key, tensor, manifest.experiment.model.vocab_size)
        if shape != tensor.shape:
            target[key] = _shard_rows(torch.empty(shape, dtype=tensor.dtype, device=tensor.device), tensor)
    _read(manifest, target, no_dist=not dist.is_initialized())
    for key, tensor in live.items():
        if target[key] is not tensor:
            copy_shard_(tensor, full_tensor(target[key]))
    for parameter in parameters.values():
        optimizer.state[parameter]["step"].copy_(live["step"])


def load_weights(manifest: Manifest) -> dict[str, Tensor]:
    """The full model of a checkpoint, in this process: {name: float32 tensor}, without vocabulary padding."""
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in GPT2(manifest.experiment.model).named_parameters()}
    tensors: dict[str, Any] = {f"model.{name}": torch.empty(shape) for name, shape in shapes.items()}
    _read(manifest, tensors, no_dist=True)
    return {key.removeprefix("model."): tensor for key, tensor in tensors.items()}


def _read(manifest: Manifest, tensors: dict[str, Any], no_dist: bool) -> None:
    """Fill `tensors`; nothing in the files is executed.

    Raises CheckpointError on all ranks if files are missing or damaged after their verification.
    """
    open_reader = partial(ThreadedReader, manifest.path)
    reader = open_reader() if no_dist else run_on_all_ranks(open_reader)
    try:
        with without_process_group_warning():
            state_dict_loader.load(tensors, storage_reader=reader, no_dist=no_dist)
    except CheckpointException as failure:
        error = first_error(failure)
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{manifest.path}: cannot be read ({problem})") from error
