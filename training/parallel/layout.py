"""Builds this process's part of a GPT-2 in any parallel layout, without changing the model's code.

    mesh = make_mesh(parallel, device.type)         # axes (pp, dp, tp); tensor ranks are adjacent
    stages = build_model(experiment, mesh, device)  # this process's part, with its initial values

`parallelize` applies the whole layout, in order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from common.settings import Experiment, ParallelSettings, TrainSettings
from training.kernels.library import selected
from training.kernels.residual import add_dropout_norm
from training.launch.device import precision_type
from training.loss import LossHead
from training.model import GPT2, initial_value
from training.parallel.data_parallel import apply_data_parallel
from training.parallel.dtensor import copy_shard_, local_shard, true_shape
from training.parallel.pipeline import Stage
from training.parallel.randomness import RANK_ATTENTION
from training.parallel.sizes import loss_parts, stage_layers, with_padded_vocabulary
from training.parallel.tensor_parallel import plain_parameters, split_matrices


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


def parallelize(
    stage: Stage, mesh: DeviceMesh | None, parallel: ParallelSettings, train: TrainSettings, device: torch.device
) -> None:
    """Apply the layout to a pipeline stage in place, from the innermost part outwards."""
    blocks = list(stage.model.h.values())
    if mesh is not None and parallel.tensor > 1:
        split_matrices(stage.model, mesh["tp"], parallel.sequence_parallel)
    for block in blocks:
        fuse_residual_norm(block)
        if train.recompute != "none":
            recompute(block, train.recompute)
    if parallel.data == 1:  # otherwise parameters are gathered in the type of the products
        stage.keep_rounded_weights()
    compile_stage(stage, train.compile, device)
    if mesh is not None and parallel.data > 1:
        apply_data_parallel(stage, blocks, mesh["dp"], parallel, stage.model.dtype)


def is_compiled(mode: str, device: torch.device) -> bool:
    """Whether `train.compile` asks for any graph on this device; `auto` does on GPUs."""
    return mode in ("blocks", "model") or (mode == "auto" and device.type == "cuda")


def compile_stage(stage: Stage, mode: str, device: torch.device) -> None:
    """Compile a stage in place: in one graph (`model`), or layers, embedding, loss (`blocks`)."""
    if not is_compiled(mode, device):
        return
    if mode == "model":
        compile_method(stage, "forward", list(stage.modules()))
    else:
        for block in stage.model.h.values():
            compile_method(block, "forward", list(block.modules()))
        rest = [module for name, module in stage.model.named_children() if name != "h"]
        for name in ("embed", "loss"):
            compile_method(stage, name, rest)


def compile_method(owner: nn.Module, name: str, modules: list[nn.Module]) -> None:
    """Compile a method that uses the parameters of `modules`, in place.

    Hooks of `owner`, such as those that gather its parameters, stay outside the graph.
    """
    compiled: Callable[..., Tensor] = torch.compile(getattr(owner, name))

    def method(*inputs: Tensor, **options: Tensor) -> Tensor:
        with plain_parameters(modules):
            return compiled(*inputs, **options)

    setattr(owner, name, method)


def fuse_residual_norm(block: Any) -> None:
    """Let `add_dropout_norm`, if selected, compute a layer's first sum and second LayerNorm."""
    plain: Callable[..., Tensor] = block.forward

    def forward(x: Tensor, ends: Tensor | None = None) -> Tensor:
        if not selected("add_dropout_norm", x):
            return plain(x, ends)
        p = block.drop.p if block.training else 0.0
        # a seed and an offset from the device's generator, which recomputation rewinds
        seed = torch.randint(2**62, (2,), device=x.device) if p else None
        weight, bias = (local_shard(each).to(x.dtype) for each in (block.ln_2.weight, block.ln_2.bias))
        x, y = add_dropout_norm(x, block.attn(block.ln_1(x), ends), p, seed, weight, bias, block.ln_2.eps)
        out: Tensor = x + block.drop(block.mlp(y))
        return out

    setattr(block, "forward", forward)  # noqa: B010


def build_model(experiment: Experiment, mesh: DeviceMesh | None, device: torch.device) -> list[Stage]:
    """This process's stages of the model on `device`, in float32, with their initial values.

    Stages are built on the meta device; each parameter is then initialised whole and sharded. So a
    process holds at most its share and one parameter, and every layout has the same values.
    """
    parallel, train, vocab_size = experiment.parallel, experiment.train, experiment.model.vocab_size
    padded, dtype = with_padded_vocabulary(experiment.model, parallel.tensor), precision_type(train.precision, device)
    rows = padded.vocab_size // parallel.tensor  # of each tensor-parallel rank
    logits = train.micro_batch_size * experiment.model.seq_len * rows * dtype.itemsize
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    chunks = loss_parts(train.loss, logits, memory)
    layers = stage_layers(experiment.model.n_layer, parallel.pipeline * parallel.virtual_stages)
    pipeline_rank, *_ = coordinates(mesh)
    stages = []
    for index in range(pipeline_rank, len(layers), parallel.pipeline):
        with torch.device("meta"):
            model = GPT2(padded, dtype)
            model.head = LossHead(vocab_size, chunks)  # type: ignore[assignment]
            stage = Stage(model, layers[index], index == 0, index == len(layers) - 1)
        parallelize(stage, mesh, parallel, train, device)
        stage.to_empty(device="cpu" if parallel.offload else device)
        with torch.no_grad():
            for name, parameter in stage.model.named_parameters():
                shape = true_shape(name, parameter, vocab_size)
                copy_shard_(parameter, initial_value(name, shape, experiment.model, experiment.train.seed))
        stages.append(stage)
    return stages


def named_parameters(stages: list[Stage]) -> dict[str, nn.Parameter]:
    """This process's parameters by their names in the whole model."""
    return {name: parameter for stage in stages for name, parameter in stage.model.named_parameters()}


_aten = torch.ops.aten
_SAVED = frozenset(
    {  # results of matrix products and attention: most of the work, little of the memory
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.torch_attn._varlen_attn.default,
        RANK_ATTENTION,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
)


def _policy(_context: object, operator: object, *_arguments: object, **_options: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(block: nn.Module, kind: str) -> None:
    """Make a layer recompute its activations in the backward pass, in place (Chen et al. 2016).

    `selective`: all except _SAVED; `full`: everything.
    """
    options: dict[str, Any] = {}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    original = block.forward

    def forward(*inputs: Tensor) -> Tensor:
        out: Tensor = checkpoint(original, *inputs, use_reentrant=False, **options)
        return out

    # replaces the method instead of wrapping the module, which would rename the parameters
    setattr(block, "forward", forward)  # noqa: B010
