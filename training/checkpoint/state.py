"""The tensors of a training run as a checkpoint holds them, and how they are loaded into any layout.

They are `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` and `step`, without vocabulary padding, which is zero after a
load. There is no random state to save: dropout and data order are pure functions of the seed and the position in the
run.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from common.errors import CheckpointError
from training.checkpoint.manifest import Manifest
from training.checkpoint.parts import held_shards, read_shards
from training.parallel.collectives import run_on_all_ranks
from training.parallel.dtensor import local_shard
from training.tensors import Sizes, all_names, leaf_of

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


def copy_to_cpu(values: Tensors, buffers: Tensors) -> None:
    """Copy tensors into CPU `buffers`, which are allocated on the first call."""
    for key, value in values.items():
        if key not in buffers:
            buffers[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        buffers[key].copy_(value, non_blocking=True)
    if any(value.is_cuda for value in values.values()):
        torch.cuda.synchronize()


def load(manifest: Manifest, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint into this rank's parameters and optimiser state, in any layout (a collective call).

    Each rank reads its own shards, in place. Raises CheckpointError on all ranks if files are missing or damaged after
    their verification.
    """
    tensors = state_tensors(parameters, optimizer)
    run_on_all_ranks(lambda: _read(manifest, tensors))
    for parameter in parameters.values():
        optimizer.state[parameter]["step"].copy_(tensors["step"])


def load_weights(manifest: Manifest) -> dict[str, Tensor]:
    """The full model of a checkpoint, in this process: {name: float32 tensor}, without vocabulary padding."""
    model = manifest.experiment.model
    sizes = Sizes(model.n_embd, 4 * model.n_embd, model.seq_len, model.vocab_size)
    weights = {name: torch.empty(leaf_of(name).shape(sizes)) for name in all_names(model.n_layer)}
    _read(manifest, {f"model.{name}": tensor for name, tensor in weights.items()})
    return weights


def _read(manifest: Manifest, tensors: Tensors) -> None:
    """Fill `tensors`; padding rows become zero."""
    shards, values = held_shards(tensors, manifest.experiment.model.vocab_size)
    for key, tensor in tensors.items():
        if tensor.dim():
            local_shard(tensor.detach())[shards[key].shape[0] :].zero_()
    try:
        read_shards(manifest, shards, values)
    except OSError as error:
        raise CheckpointError(f"{manifest.path}: cannot be read ({error})") from error
