"""Tensor parallelism, with or without sequence parallelism, from PyTorch's own parts.

After Shoeybi et al. 2019 (section 3) and Korthikanti et al. 2022 (section 4.2.2). Between the split matrices every
activation is a plain tensor: equal on all ranks of the group or, with sequence parallelism, each rank's slice of the
sequence. Every parameter is a DTensor, so that gradient norms and checkpoints see one whole model.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from training.loss import LossHead, Vocabulary
from training.parallel.dtensor import local_shard
from training.parallel.vocabulary import padded_vocab_size


class PlainActivations(ParallelStyle):
    """A module outside the split matrices: plain tensors in and out, DTensor parameters.

    `placement` of the (B, T, C) activations between the matrices: Replicate(), or Shard(1) with sequence parallelism.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def _enter(self, _module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
        return (DTensor.from_local(inputs[0], mesh, [self.placement]), *inputs[1:])

    @staticmethod
    def _leave(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
        return output.to_local()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=self._enter, output_fn=self._leave)


class Positions(PlainActivations):
    """The position embedding: each rank looks up the positions of its slice of the sequence."""

    def _enter(self, _module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
        positions = inputs[0]  # (T,) or (B, T), whole on every rank
        placement = Shard(positions.dim() - 1) if isinstance(self.placement, Shard) else self.placement
        return (DTensor.from_local(positions, mesh, [Replicate()]).redistribute(placements=[placement]),)


class VocabParallelEmbedding(PlainActivations):
    """The token embedding: each rank looks up the tokens in its rows, and the results are summed.

    RowwiseParallel does the same, but allocates the gradient of all rows on each rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rows = distribute_tensor(module.get_parameter("weight"), device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(rows))
        rank = device_mesh.get_local_rank()

        def forward(tokens: Tensor) -> Tensor:
            shard = local_shard(module.get_parameter("weight"))
            row = tokens - rank * len(shard)  # the vocabulary is padded so that all ranks have as many rows
            elsewhere = (row < 0) | (row >= len(shard))
            x = F.embedding(row.masked_fill(elsewhere, 0), shard).masked_fill(elsewhere[..., None], 0)
            return DTensor.from_local(x, device_mesh, [Partial()]).redistribute(placements=[self.placement]).to_local()

        setattr(module, "forward", forward)  # noqa: B010
        return module


class VocabParallelLoss(PlainActivations):
    """The loss: each rank computes the logits of its shard of the vocabulary, and the gradients of `x` are summed."""

    def _enter(self, _module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
        x, weight, targets = inputs  # the weight is wte's, already Shard(0)
        whole = DTensor.from_local(x, mesh, [self.placement]).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()]), local_shard(weight), targets

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, LossHead)
        true, ranks = module.vocabulary.rows, device_mesh.size()
        held = padded_vocab_size(true, ranks) // ranks
        first = held * device_mesh.get_local_rank()
        rows = max(0, min(held, true - first))
        module.vocabulary = Vocabulary(first, rows, device_mesh.get_group().group_name)
        return distribute_module(module, device_mesh, input_fn=self._enter)


def split_matrices(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split a GPT-2, or one pipeline stage of it, over the ranks of `mesh`, in place."""
    placement: Placement = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "wte": VocabParallelEmbedding(placement),
        "wpe": Positions(placement),
        "h.*.ln_1": PlainActivations(placement),
        "h.*.attn.c_attn": ColwiseParallel(input_layouts=placement),  # rows [head, (q, k, v), dim]: heads stay whole
        "h.*.attn.c_proj": RowwiseParallel(output_layouts=placement),
        "h.*.ln_2": PlainActivations(placement),
        "h.*.mlp.c_fc": ColwiseParallel(input_layouts=placement),
        "h.*.mlp.c_proj": RowwiseParallel(output_layouts=placement),
        "ln_f": PlainActivations(placement),
        "head": VocabParallelLoss(placement),
    }
    parts = {name for name, _ in model.named_children()}
    parallelize_module(model, mesh, {key: style for key, style in plan.items() if key.partition(".")[0] in parts})
