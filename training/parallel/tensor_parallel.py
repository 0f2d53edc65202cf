"""Tensor parallelism, with or without sequence parallelism, from PyTorch's own parts.

After Shoeybi et al. 2019 (section 3) and Korthikanti et al. 2022 (section 4.2.2). Between the matrices that are split,
every activation is a plain tensor: equal on all ranks of the group, or, with sequence parallelism, one slice of the
sequence a rank. Every parameter is a DTensor, so that gradient norms and checkpoints see one whole model.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from training.parallel.dtensor import local_shard


class PlainActivations(ParallelStyle):
    """A module outside the split matrices: plain tensors in and out, DTensor parameters.

    `layout` is how the activations lie between the matrices: Replicate(), or Shard(1) of (B, T, C).
    """

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self.layout = layout

    def _enter(self, _module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
        return (DTensor.from_local(inputs[0], mesh, [self.layout]), *inputs[1:])

    @staticmethod
    def _leave(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
        return output.to_local()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=self._enter, output_fn=self._leave)


class Positions(PlainActivations):
    """The position embedding: every rank looks up the positions of its part of the sequence."""

    def _enter(self, _module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
        positions = inputs[0]  # (T,) or (B, T), whole on every rank
        layout = Shard(positions.dim() - 1) if isinstance(self.layout, Shard) else self.layout
        return (DTensor.from_local(positions, mesh, [Replicate()]).redistribute(placements=[layout]),)


class VocabParallelEmbedding(PlainActivations):
    """The token embedding: every rank looks up the tokens of its rows, and the results are added.

    RowwiseParallel does the same, but makes the gradient of all rows on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rows = distribute_tensor(module.get_parameter("weight"), device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(rows))
        rank = device_mesh.get_local_rank()

        def forward(tokens: Tensor) -> Tensor:
            mine = local_shard(module.get_parameter("weight"))
            place = tokens - rank * len(mine)  # the vocabulary is padded so that all have as many rows
            elsewhere = (place < 0) | (place >= len(mine))
            x = F.embedding(place.masked_fill(elsewhere, 0), mine).masked_fill(elsewhere[..., None], 0)
            return DTensor.from_local(x, device_mesh, [Partial()]).redistribute(placements=[self.layout]).to_local()

        setattr(module, "forward", forward)  # noqa: B010
        return module


class VocabParallelHead(PlainActivations):
    """The head on its shard of the vocabulary: plain input, logits stay a DTensor sharded over the vocabulary."""

    def _enter(self, _module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
        x, weight = inputs  # the weight is wte's, already Shard(0)
        return DTensor.from_local(x, mesh, [self.layout]).redistribute(placements=[Replicate()]), weight

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        bias = distribute_tensor(module.get_buffer("vocab_bias"), device_mesh, [Shard(0)])
        module.register_buffer("vocab_bias", bias, persistent=False)
        return distribute_module(module, device_mesh, input_fn=self._enter)


def split_matrices(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split a GPT-2, or the part of one that a pipeline stage holds, over the ranks of `mesh`, in place."""
    layout: Placement = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "wte": VocabParallelEmbedding(layout),
        "wpe": Positions(layout),
        "h.*.ln_1": PlainActivations(layout),
        "h.*.attn.c_attn": ColwiseParallel(input_layouts=layout),  # rows [head, (q, k, v), dim]: heads stay whole
        "h.*.attn.c_proj": RowwiseParallel(output_layouts=layout),
        "h.*.ln_2": PlainActivations(layout),
        "h.*.mlp.c_fc": ColwiseParallel(input_layouts=layout),
        "h.*.mlp.c_proj": RowwiseParallel(output_layouts=layout),
        "ln_f": PlainActivations(layout),
        "head": VocabParallelHead(layout),
    }
    parts = {name for name, _ in model.named_children()}
    parallelize_module(model, mesh, {key: style for key, style in plan.items() if key.partition(".")[0] in parts})
