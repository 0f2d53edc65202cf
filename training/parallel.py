"""How one GPT-2 is spread over many processes: the model file knows nothing of this one.

    mesh = make_mesh(world, parallel)           # axes (dp, tp); tensor-parallel ranks are adjacent
    model = build_model(run, mesh, device)      # parallelised, on its device, with its initial values

Tensor parallel after Shoeybi et al. 2019 (section 3), from PyTorch's own parts. Every activation outside the split
regions is a plain tensor that is equal on all ranks of a tensor-parallel group; every parameter is a DTensor, so that
gradient norms and checkpoints see one whole model.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from common.settings import ModelRun, ParallelSettings
from training.model import GPT2, initial_value, padded_vocab_size


def make_mesh(parallel: ParallelSettings, device_type: str) -> DeviceMesh | None:
    """The device mesh (dp, tp) over all processes; None for a single process, which needs none of this."""
    if parallel.data * parallel.tensor == 1:
        return None
    return init_device_mesh(device_type, (parallel.data, parallel.tensor), mesh_dim_names=("dp", "tp"))


class ReplicatedParallel(ParallelStyle):
    """A module that every tensor-parallel rank computes alike: plain tensors in and out, DTensor parameters."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            input_fn=self._enter,  # type: ignore[arg-type]
            output_fn=lambda _module, output, _mesh: output.to_local(),
        )

    @staticmethod
    def _enter(_module: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> tuple[Tensor]:
        return (DTensor.from_local(inputs[0], mesh, [Replicate()]),)


class VocabParallelHead(ParallelStyle):
    """The head on its shard of the vocabulary: plain input, logits stay a DTensor sharded over the vocabulary."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: tuple[Tensor, Tensor], mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
            x, weight = inputs  # the weight is wte's, already Shard(0)
            return DTensor.from_local(x, mesh, [Replicate()]), weight

        module.register_buffer(
            "vocab_bias", distribute_tensor(module.get_buffer("vocab_bias"), device_mesh, [Shard(0)]), persistent=False
        )
        return distribute_module(module, device_mesh, input_fn=enter)  # type: ignore[arg-type]


def parallelize(model: GPT2, mesh: DeviceMesh | None, parallel: ParallelSettings) -> None:
    """Apply the layout to `model` in place: split the matrices over tp, then replicate the result over dp."""
    if mesh is None:
        return
    if parallel.tensor > 1:
        replicated = ReplicatedParallel()
        parallelize_module(
            model,
            mesh["tp"],
            {
                "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),  # by vocabulary rows
                "wpe": replicated,
                "h.*.ln_1": replicated,
                "h.*.attn.c_attn": ColwiseParallel(),  # rows [head, (q, k, v), dim]: whole heads stay together
                "h.*.attn.c_proj": RowwiseParallel(),
                "h.*.ln_2": replicated,
                "h.*.mlp.c_fc": ColwiseParallel(),
                "h.*.mlp.c_proj": RowwiseParallel(),
                "ln_f": replicated,
                "head": VocabParallelHead(),
            },
        )
    if parallel.data > 1:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        # The logits are a view (a 3-D linear is a 2-D one, reshaped); nothing here changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        for block in model.h:
            replicate(block, mesh=mesh["dp"])  # a group of its own: its all-reduce overlaps the backward pass
        replicate(model, mesh=mesh["dp"])


def build_model(run: ModelRun, mesh: DeviceMesh | None, device: torch.device) -> GPT2:
    """The model of `run` in its layout, on `device`, float32, with the initial values of its seed.

    It is laid out on the meta device first, and each parameter is then drawn whole and cut, so that no process ever
    holds more than its share of the model plus one parameter, and the values are the same in every layout.
    """
    with torch.device("meta"):
        model = GPT2(run.model, padded_vocab_size(run.model.vocab_size, run.parallel.tensor))
    parallelize(model, mesh, run.parallel)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = true_shape(name, parameter, run.model.vocab_size)
            place(parameter, initial_value(name, shape, run.model, run.train.seed))
        vocab_bias = torch.zeros(model.vocab_rows)
        vocab_bias[run.model.vocab_size :] = -torch.inf
        place(model.head.vocab_bias, vocab_bias)
    return model


# ------------------------------------------------------------------------------------- whole tensors and local parts


def true_shape(name: str, tensor: Tensor, vocab_size: int) -> torch.Size:
    """The shape of a parameter (or a moment of it) without the padding rows that wte carries in a layout."""
    return torch.Size((vocab_size, *tensor.shape[1:])) if name == "wte.weight" else tensor.shape


def place(target: Tensor, whole: Tensor) -> None:
    """Copy this process' part of `whole` into `target`; rows that `whole` lacks (vocabulary padding) become zero."""
    missing = target.shape[0] - whole.shape[0]
    if missing:
        whole = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
    whole = whole.to(target.device)
    if isinstance(target, DTensor):
        # src_data_rank=None: every process already holds the same values, nothing need be sent
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    with torch.no_grad():
        target.copy_(whole)


def plain(tensor: Any) -> Tensor:
    """The whole value of a DTensor (a collective call), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
