"""The tensors of a training run as a checkpoint holds them, and how they are loaded into any layout.

They are `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` and `step`. A checkpoint has the true vocabulary rows only:
padding belongs to a layout, is left out when the save is planned (`writing`), and is zero after a load. There is no
random state to save: dropout and data order are pure functions of the seed and the position in the run.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from common.errors import CheckpointError
from training.checkpoint.manifest import Manifest
from training.checkpoint.storage import ThreadedReader, first_error, without_process_group_warning
from training.model import GPT2
from training.parallel.collectives import run_on_all_ranks
from training.parallel.dtensor import local_shard, true_shape

Parameters = Mapping[str, nn.Parameter]
Tensors = dict[str, Tensor]


def state_tensors(parameters: Parameters, optimizer: torch.optim.Optimizer) -> Tensors:
    """The parameters and optimiser state by their names in a checkpoint, vocabulary padding included.

    All alias live memory.
    """
    tensors: Tensors = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        tensors |= {f"{moment}.{name}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
        tensors["step"] = state["step"]  # equal for all parameters
    return tensors


def unpadded_shape(key: str, tensor: Tensor, vocab_size: int) -> torch.Size:
    """The shape of a tensor in a checkpoint."""
    return true_shape(key.partition(".")[2], tensor, vocab_size)


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


def load(manifest: Manifest, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint into this rank's parameters and optimiser state, in any layout (a collective call).

    Each rank reads its own shards, in place.
    """
    tensors = state_tensors(parameters, optimizer)
    vocab_size = manifest.experiment.model.vocab_size
    _read(manifest, tensors, no_dist=not dist.is_initialized())
    for key, tensor in tensors.items():
        rows = unpadded_shape(key, tensor, vocab_size)[:1]
        if rows != tensor.shape[:1]:
            local_shard(tensor)[max(0, rows[0] - _first_row(tensor)) :].zero_()
    for parameter in parameters.values():
        optimizer.state[parameter]["step"].copy_(tensors["step"])


def _first_row(tensor: Tensor) -> int:
    """The row of the whole tensor at which this rank's shard begins."""
    if not isinstance(tensor, DTensor):
        return 0
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1][0]


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
            planner = _Planner(manifest.experiment.model.vocab_size)
            state_dict_loader.load(tensors, storage_reader=reader, planner=planner, no_dist=no_dist)
    except CheckpointException as failure:
        error = first_error(failure)
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{manifest.path}: cannot be read ({problem})") from error


class _Planner(DefaultLoadPlanner):
    """Reads into tensors that have padding rows; those rows are in no chunk of the checkpoint and stay as they are."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Prepare a load into `state_dict` (called by DCP)."""
        assert metadata is not None
        for key, tensor in state_dict.items():
            stored = metadata.state_dict_metadata.get(key)
            shape = unpadded_shape(key, tensor, self.vocab_size)
            if isinstance(stored, TensorStorageMetadata) and stored.size == shape:
                stored.size = tensor.shape  # DCP refuses tensors whose size differs
        super().set_up_planner(state_dict, metadata, is_coordinator)
