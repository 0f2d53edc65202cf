"""Tensor parallelism, with or without sequence parallelism: modules that take the places of a GPT-2's own.

After Shoeybi et al. 2019 (section 3) and Korthikanti et al. 2022 (section 4.2.2). Every parameter is a DTensor, so that
gradient norms and checkpoints see one whole model. The modules compute with this rank's shards, which are plain
tensors: kernels can take them, and torch.compile and recompute see plain operations and collectives.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from training.kernels import ops
from training.loss import LossHead, Vocabulary
from training.model import ResidualNorm
from training.parallel.dtensor import local_shard
from training.parallel.tensor_regions import TensorRanks, enter, leave
from training.parallel.vocabulary import padded_vocab_size


class _Split(nn.Module):
    """A module of the model whose parameters are distributed over `mesh`."""

    def __init__(self, whole: nn.Module, mesh: DeviceMesh, ranks: TensorRanks, **placements: Placement) -> None:
        super().__init__()
        self.ranks = ranks
        for name, parameter in whole.named_parameters():
            rows = distribute_tensor(parameter.detach(), mesh, [placements.get(name, Replicate())])
            self.register_parameter(name, nn.Parameter(rows))

    def shard(self, name: str) -> Tensor:
        """This rank's shard of a parameter.

        Each rank computes the whole gradient of a replicated parameter or, from its slice of the sequence, a part.
        """
        parameter: Tensor = getattr(self, name)
        if not isinstance(parameter, DTensor):
            return parameter
        partial = self.ranks.slices and parameter.placements[0].is_replicate()
        shard: Tensor = parameter.to_local(grad_placements=[Partial()] if partial else parameter.placements)
        return shard


@contextmanager
def plain_parameters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the parameters of split modules are this rank's shards: a compiled graph then has no DTensor."""
    distributed = [(module, dict(module._parameters)) for module in modules if isinstance(module, _Split)]
    try:
        for module, parameters in distributed:
            module._parameters.update({name: module.shard(name) for name in parameters})  # type: ignore[misc]
        yield
    finally:
        for module, parameters in distributed:
            module._parameters.update(parameters)


class ColumnLinear(_Split):
    """A Linear whose outputs are split over the ranks."""

    def __init__(self, whole: nn.Module, mesh: DeviceMesh, ranks: TensorRanks) -> None:
        super().__init__(whole, mesh, ranks, weight=Shard(0), bias=Shard(0))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T or T / ranks, in) -> (B, T, out / ranks)."""
        return F.linear(enter(x, self.ranks), self.shard("weight").to(x.dtype), self.shard("bias").to(x.dtype))


class ColumnGeluLinear(ColumnLinear):
    """A Linear with GELU whose outputs are split over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T or T / ranks, in) -> (B, T, out / ranks)."""
        return ops.linear_gelu(enter(x, self.ranks), self.shard("weight").to(x.dtype), self.shard("bias").to(x.dtype))


class RowLinear(_Split):
    """A Linear whose inputs are split over the ranks."""

    def __init__(self, whole: nn.Module, mesh: DeviceMesh, ranks: TensorRanks) -> None:
        super().__init__(whole, mesh, ranks, weight=Shard(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in / ranks) -> (B, T or T / ranks, out)."""
        return leave(F.linear(x, self.shard("weight").to(x.dtype)), self.ranks) + self.shard("bias").to(x.dtype)


class SplitLayerNorm(_Split):
    """A LayerNorm of activations outside the split matrices."""

    def __init__(self, whole: nn.Module, mesh: DeviceMesh, ranks: TensorRanks) -> None:
        super().__init__(whole, mesh, ranks)
        self.eps = cast(nn.LayerNorm, whole).eps

    def forward(self, x: Tensor) -> Tensor:
        """(B, T or T / ranks, C) -> the same shape."""
        weight, bias = self.shard("weight").to(x.dtype), self.shard("bias").to(x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


class SplitResidualNorm(SplitLayerNorm):
    """A ResidualNorm of activations outside the split matrices."""

    def __init__(self, whole: nn.Module, mesh: DeviceMesh, ranks: TensorRanks) -> None:
        super().__init__(whole, mesh, ranks)
        self.dropout = cast(ResidualNorm, whole).dropout

    def forward(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(B, T or T / ranks, C) twice -> the same shape twice."""
        p = self.dropout if self.training else 0.0
        weight, bias = self.shard("weight").to(x.dtype), self.shard("bias").to(x.dtype)
        return ops.residual_norm(x, branch, p, weight, bias, self.eps)


class Positions(_Split):
    """The position embedding: each rank looks up the positions of its slice of the sequence."""

    def forward(self, positions: Tensor) -> Tensor:
        """(T,) or (B, T), whole on every rank -> (T or T / ranks, C) or (B, T or T / ranks, C)."""
        if self.ranks.slices:
            positions = positions.chunk(self.ranks.size, dim=-1)[self.ranks.rank]
        return F.embedding(positions, self.shard("weight"))


class VocabParallelEmbedding(_Split):
    """The token embedding: each rank looks up the tokens in its rows, and the results are summed."""

    def __init__(self, whole: nn.Module, mesh: DeviceMesh, ranks: TensorRanks) -> None:
        super().__init__(whole, mesh, ranks, weight=Shard(0))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T or T / ranks, C)."""
        weight = self.shard("weight")
        row = tokens - self.ranks.rank * len(weight)  # the vocabulary is padded so that all ranks have as many rows
        elsewhere = (row < 0) | (row >= len(weight))
        x = F.embedding(row.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0)
        return leave(x, self.ranks)


class VocabParallelLoss(LossHead):
    """The loss: each rank computes the logits of its rows of the vocabulary, and the gradients of `x` are summed."""

    def __init__(self, whole: LossHead, ranks: TensorRanks) -> None:
        true = whole.vocabulary.rows
        super().__init__(true, whole.chunks)
        held = padded_vocab_size(true, ranks.size) // ranks.size
        first = held * ranks.rank
        self.ranks, self.vocabulary = ranks, Vocabulary(first, max(0, min(held, true - first)), ranks.group)

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """(B, T or T / ranks, C), wte's (V, C), (B, T) -> float32 nats, summed, ()."""
        return super().forward(enter(x, self.ranks), local_shard(weight), targets)


_PARTS: dict[str, Callable[[nn.Module, DeviceMesh, TensorRanks], _Split]] = {
    "wte": VocabParallelEmbedding,
    "wpe": Positions,
    "ln_1": SplitLayerNorm,
    "c_attn": ColumnLinear,  # rows [head, (q, k, v), dim]: heads stay whole
    "c_fc": ColumnGeluLinear,
    "c_proj": RowLinear,  # of attention and of the MLP
    "ln_2": SplitResidualNorm,
    "ln_f": SplitLayerNorm,
}


def split_matrices(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split a GPT-2, or one pipeline stage of it, over the ranks of `mesh`, in place."""
    ranks = TensorRanks.of(mesh, sequence_parallel)
    for name, module in list(model.named_modules()):
        part = name.rpartition(".")[2]
        if part in _PARTS:
            model.set_submodule(name, _PARTS[part](module, mesh, ranks))
        elif isinstance(module, LossHead):
            model.set_submodule(name, VocabParallelLoss(module, ranks))
