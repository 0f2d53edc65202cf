"""How one GPT-2 is spread over many processes: the model file knows nothing of this one.

    mesh = make_mesh(parallel, device.type)     # axes (pp, dp, tp); tensor-parallel ranks are adjacent
    stages = build_model(run, mesh, device)     # this process' part, on its device, with its initial values

`parallelize` applies a layout, all of it, in order.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.settings import Experiment, ParallelSettings
from training.model import GPT2, initial_value, padded_vocab_size
from training.parallel.data_parallel import apply_data_parallel
from training.parallel.dtensor import copy_shard_, true_shape
from training.parallel.pipeline import Stage, stage_layers
from training.parallel.recompute import recompute
from training.parallel.tensor_parallel import split_matrices


def make_mesh(parallel: ParallelSettings, device_type: str) -> DeviceMesh | None:
    """The device mesh (pp, dp, tp) over all processes; None for a single process, which needs none of this."""
    sizes = (parallel.pipeline, parallel.data, parallel.tensor)
    if sizes == (1, 1, 1):
        return None
    return init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp", "tp"))


def parallelize(stage: Stage, mesh: DeviceMesh | None, experiment: Experiment, device: torch.device) -> None:
    """Apply the layout to a pipeline stage in place, from the inside out."""
    parallel, blocks = experiment.parallel, list(stage.model.h.values())
    if mesh is not None and parallel.tensor > 1:
        split_matrices(stage.model, mesh["tp"], parallel.sequence_parallel)
    if experiment.train.recompute != "none":
        for block in blocks:
            recompute(block, experiment.train.recompute)
    if experiment.train.compile if experiment.train.compile is not None else device.type == "cuda":
        for block in blocks:
            block.compile()
    if mesh is not None and parallel.data > 1:
        apply_data_parallel(stage, blocks, mesh["dp"], parallel)


def build_model(experiment: Experiment, mesh: DeviceMesh | None, device: torch.device) -> list[Stage]:
    """This process' stages of the model of `run`, on `device`, float32, with the initial values of its seed.

    They are laid out on the meta device first, and each parameter is then drawn whole and cut, so that no process ever
    holds more than its share of the model plus one parameter, and the values are the same in every layout.
    """
    layers = stage_layers(experiment.model.n_layer, experiment.parallel.pipeline * experiment.parallel.virtual_stages)
    rank = mesh.get_local_rank("pp") if mesh else 0
    stages = []
    for number in range(rank, len(layers), experiment.parallel.pipeline):
        with torch.device("meta"):
            model = GPT2(experiment.model, padded_vocab_size(experiment.model.vocab_size, experiment.parallel.tensor))
            stage = Stage(model, layers[number], number == 0, number == len(layers) - 1, experiment.train.precision)
        parallelize(stage, mesh, experiment, device)
        stage.to_empty(device="cpu" if experiment.parallel.offload else device)
        with torch.no_grad():
            for name, parameter in stage.model.named_parameters():
                shape = true_shape(name, parameter, experiment.model.vocab_size)
                copy_shard_(parameter, initial_value(name, shape, experiment.model, experiment.train.seed))
            if stage.last:
                model.head.to_empty(device=device)  # offloading is for parameters
                vocab_bias = torch.zeros(model.vocab_rows)
                vocab_bias[experiment.model.vocab_size :] = -torch.inf
                copy_shard_(model.head.vocab_bias, vocab_bias)
        stages.append(stage)
    return stages


def named_parameters(stages: list[Stage]) -> dict[str, nn.Parameter]:
    """The parameters of this process by their names in the whole model."""
    return {name: parameter for stage in stages for name, parameter in stage.model.named_parameters()}
