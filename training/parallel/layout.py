"""Builds this process's part of a GPT-2 in any parallel layout, without changing the model's code.

    mesh = make_mesh(parallel, device.type)             # axes (pp, dp, tp); tensor-parallel ranks are adjacent
    stages = build_model(experiment, mesh, device)      # this process's part, on its device, with its initial values

`parallelize` applies the whole layout, in order.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.settings import Experiment, ParallelSettings
from training.model import GPT2, initial_value
from training.parallel.data_parallel import apply_data_parallel
from training.parallel.dtensor import copy_shard_, true_shape
from training.parallel.pipeline import Stage, stage_layers
from training.parallel.recompute import recompute
from training.parallel.tensor_parallel import split_matrices
from training.parallel.vocabulary import PaddedHead, vocab_bias, with_padded_vocabulary


def make_mesh(parallel: ParallelSettings, device_type: str) -> DeviceMesh | None:
    """The device mesh (pp, dp, tp) over all processes; None for a single process."""
    sizes = (parallel.pipeline, parallel.data, parallel.tensor)
    if sizes == (1, 1, 1):
        return None
    return init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp", "tp"))


def coordinates(mesh: DeviceMesh | None) -> tuple[int, int, int]:
    """This process's (pp, dp, tp) coordinates."""
    if mesh is None:
        return 0, 0, 0
    return mesh.get_local_rank("pp"), mesh.get_local_rank("dp"), mesh.get_local_rank("tp")


def parallelize(stage: Stage, mesh: DeviceMesh | None, experiment: Experiment, device: torch.device) -> None:
    """Apply the layout to a pipeline stage in place, from the innermost part outwards."""
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
    """This process's stages of the model on `device`, in float32, with the initial values of `train.seed`.

    Stages are built on the meta device; each parameter is then initialised whole and sharded. So no process ever holds
    more than its share of the model plus one parameter, and the values are the same in every layout.
    """
    parallel, vocab_size = experiment.parallel, experiment.model.vocab_size
    layers = stage_layers(experiment.model.n_layer, parallel.pipeline * parallel.virtual_stages)
    padded = with_padded_vocabulary(experiment.model, parallel.tensor)
    pipeline_rank, *_ = coordinates(mesh)
    stages = []
    for index in range(pipeline_rank, len(layers), parallel.pipeline):
        with torch.device("meta"):
            model = GPT2(padded)
            model.head = head = PaddedHead(padded.vocab_size)
            stage = Stage(model, layers[index], index == 0, index == len(layers) - 1, experiment.train.precision)
        parallelize(stage, mesh, experiment, device)
        stage.to_empty(device="cpu" if parallel.offload else device)
        with torch.no_grad():
            for name, parameter in stage.model.named_parameters():
                shape = true_shape(name, parameter, vocab_size)
                copy_shard_(parameter, initial_value(name, shape, experiment.model, experiment.train.seed))
            if stage.last:
                head.to_empty(device=device)  # only parameters are offloaded
                copy_shard_(head.vocab_bias, vocab_bias(vocab_size, padded.vocab_size))
        stages.append(stage)
    return stages


def named_parameters(stages: list[Stage]) -> dict[str, nn.Parameter]:
    """This process's parameters by their names in the whole model."""
    return {name: parameter for stage in stages for name, parameter in stage.model.named_parameters()}
