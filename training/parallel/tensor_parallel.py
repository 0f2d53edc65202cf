"""Tensor parallelism, with or without sequence parallelism: modules that replace a GPT-2's own.

After Shoeybi et al. 2019 (section 3) and Korthikanti et al. 2022 (section 4.2.2). Every parameter
is a DTensor, so that gradient norms and checkpoints see one whole model. The modules compute with
this rank's shards, which are plain tensors: kernels can take them, and torch.compile and recompute
see plain operations and collectives.

Between the split matrices, every rank holds the same activations or, with sequence parallelism, its
slice of the sequence. `enter` (before a matrix split by rows) and `leave` (after one split by
columns) are each other's gradient: the f and g of Shoeybi et al., figure 3, or those of Korthikanti
et al., figure 5. They call the collectives of torch.compile, which a graph may hold.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from training.kernels import ops
from training.kernels.ops import Heads
from training.loss import LossHead, Vocabulary
from training.model import GeluLinear, HeadsLinear, LayerNorm, Linear
from training.parallel.dtensor import local_shard
from training.parallel.sizes import padded_vocab_size
from training.tensors import leaf_of

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_collectives = torch.ops._c10d_functional


class TensorRanks(NamedTuple):
    """A tensor-parallel group, and this process in it."""

    group: "GroupName"
    size: int
    rank: int
    slices: bool  # sequence parallelism: activations outside the split matrices are slices


_Function = Callable[[Tensor, TensorRanks], Tensor]


def enter(x: Tensor, ranks: TensorRanks) -> Tensor:
    """(B, T or T / ranks, C) -> (B, T, C)."""
    entered: Tensor = _Exchange.apply(x, ranks, _spread, _sum)  # type: ignore[no-untyped-call]
    return entered


def leave(x: Tensor, ranks: TensorRanks) -> Tensor:
    """(B, T, C) -> their sum over the ranks, (B, T or T / ranks, C)."""
    left: Tensor = _Exchange.apply(x, ranks, _sum, _spread)  # type: ignore[no-untyped-call]
    return left


class _Exchange(torch.autograd.Function):
    """Applies one function of (x, ranks), and another one to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks, there: _Function, back: _Function) -> Tensor:
        ctx.ranks, ctx.back = ranks, back
        return there(x, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradients[0], ctx.ranks), None, None, None


def _sum(x: Tensor, ranks: TensorRanks) -> Tensor:
    """(B, T, C) -> the sum over the ranks, whole or this rank's slice of the sequence."""
    if not ranks.slices:
        return _wait(_collectives.all_reduce(x.contiguous(), "sum", ranks.group))
    B, T, C = x.shape
    slices = x.reshape(B, ranks.size, T // ranks.size, C).transpose(0, 1)  # (B, T, C) -> (ranks, B, T / ranks, C)
    return _wait(_collectives.reduce_scatter_tensor(slices.flatten(0, 1), "sum", ranks.size, ranks.group))


def _spread(x: Tensor, ranks: TensorRanks) -> Tensor:
    """(B, T or T / ranks, C) -> (B, T, C)."""
    if not ranks.slices:
        return x.view_as(x)
    slices = _wait(_collectives.all_gather_into_tensor(x.contiguous(), ranks.size, ranks.group))
    slices = slices.view(ranks.size, *x.shape)  # (ranks * B, T / ranks, C) -> (ranks, B, T / ranks, C)
    return slices.transpose(0, 1).flatten(1, 2)  # (B, T, C)


def _wait(x: Tensor) -> Tensor:
    done: Tensor = _collectives.wait_tensor(x)
    return done


# ----------------------------------------------------------------------------- split modules


class _Split(nn.Module):
    """A module of the model whose parameters are distributed over `mesh`."""

    def __init__(self, whole: nn.Module, name: str, mesh: DeviceMesh, ranks: TensorRanks) -> None:
        super().__init__()
        self.ranks = ranks
        for kind, parameter in whole.named_parameters():
            dim = leaf_of(f"{name}.{kind}").split
            placement: Placement = Replicate() if dim is None else Shard(dim)
            self.register_parameter(kind, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))

    def shard(self, name: str) -> Tensor:
        """This rank's shard of a parameter; its gradient may be that of a slice of the sequence.

        `training.parallel.gradients` sums those of a step at once.
        """
        return local_shard(getattr(self, name))


@contextmanager
def plain_parameters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, parameters of split modules are this rank's shards: compiled graphs need that."""
    distributed = [(module, dict(module._parameters)) for module in modules if isinstance(module, _Split)]
    try:
        for module, parameters in distributed:
            module._parameters.update({name: module.shard(name) for name in parameters})  # type: ignore[misc]
        yield
    finally:
        for module, parameters in distributed:
            module._parameters.update(parameters)


class _SplitLinear(_Split):
    rounded: Tensor | None

    def __init__(self, whole: nn.Module, name: str, mesh: DeviceMesh, ranks: TensorRanks) -> None:
        super().__init__(whole, name, mesh, ranks)
        self.register_buffer("rounded", None, persistent=False)


class ColumnHeadsLinear(_SplitLinear):
    """A HeadsLinear whose heads are split over the ranks."""

    def __init__(self, whole: nn.Module, name: str, mesh: DeviceMesh, ranks: TensorRanks) -> None:
        super().__init__(whole, name, mesh, ranks)
        self.head_size = cast(HeadsLinear, whole).head_size

    def forward(self, x: Tensor) -> Heads:
        """(B, T or T / ranks, C) -> q, k and v, (B, nh / ranks, T, hs) each."""
        x, size = enter(x, self.ranks), self.head_size
        return ops.linear_heads(x, self.shard("weight"), self.shard("bias"), size, self.rounded)


class ColumnGeluLinear(_SplitLinear):
    """A Linear with GELU whose outputs are split over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T or T / ranks, in) -> (B, T, out / ranks)."""
        return ops.linear_gelu(enter(x, self.ranks), self.shard("weight"), self.shard("bias"), self.rounded)


class RowLinear(_SplitLinear):
    """A Linear whose inputs are split over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in / ranks) -> (B, T or T / ranks, out)."""
        product = ops.linear(x, self.shard("weight"), None, self.rounded)
        return leave(product, self.ranks) + self.shard("bias").to(x.dtype)


class SplitLayerNorm(_Split):
    """A LayerNorm of activations outside the split matrices."""

    def __init__(self, whole: nn.Module, name: str, mesh: DeviceMesh, ranks: TensorRanks) -> None:
        super().__init__(whole, name, mesh, ranks)
        self.eps = cast(nn.LayerNorm, whole).eps

    def forward(self, x: Tensor) -> Tensor:
        """(B, T or T / ranks, C) -> the same shape."""
        weight, bias = self.shard("weight").to(x.dtype), self.shard("bias").to(x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


class Positions(_Split):
    """The position embedding: each rank looks up the positions of its slice of the sequence."""

    def forward(self, positions: Tensor) -> Tensor:
        """(T,) or (B, T), whole on every rank -> (T or T / ranks, C) or (B, T or T / ranks, C)."""
        if self.ranks.slices:
            positions = positions.chunk(self.ranks.size, dim=-1)[self.ranks.rank]
        return F.embedding(positions, self.shard("weight"))


class VocabParallelEmbedding(_Split):
    """The token embedding: each rank looks up the tokens in its rows; the results are summed."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T or T / ranks, C)."""
        weight = self.shard("weight")
        row = tokens - self.ranks.rank * len(weight)  # the vocabulary is padded: all ranks have equally many rows
        elsewhere = (row < 0) | (row >= len(weight))
        x = F.embedding(row.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0)
        return leave(x, self.ranks)


class VocabParallelLoss(LossHead):
    """The loss: each rank has the logits of its vocabulary rows; gradients of `x` are summed."""

    def __init__(self, whole: LossHead, ranks: TensorRanks) -> None:
        true = whole.vocabulary.rows
        super().__init__(true, whole.chunks)
        held = padded_vocab_size(true, ranks.size) // ranks.size
        first = held * ranks.rank
        self.ranks, self.vocabulary = ranks, Vocabulary(first, max(0, min(held, true - first)), ranks.group)

    def local(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's x and weight: (B, T or T / ranks, C), (V, C) -> (B, T, C), (V / ranks, C)."""
        return enter(x, self.ranks), local_shard(weight)


_SPLIT: dict[tuple[type[nn.Module], int | None], type[_Split]] = {
    (nn.Embedding, 0): VocabParallelEmbedding,
    (nn.Embedding, None): Positions,
    (LayerNorm, None): SplitLayerNorm,
    (HeadsLinear, 0): ColumnHeadsLinear,
    (GeluLinear, 0): ColumnGeluLinear,
    (Linear, 1): RowLinear,
}
"""What takes the place of a module, by its type and by how `training.tensors` splits its weight."""


def split_matrices(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split a GPT-2, or one pipeline stage of it, over the ranks of `mesh`, in place."""
    ranks = TensorRanks(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), sequence_parallel)
    for name, module in list(model.named_modules()):
        if isinstance(module, LossHead):
            model.set_submodule(name, VocabParallelLoss(module, ranks))
        elif type(module) in {kind for kind, _ in _SPLIT}:
            split = _SPLIT[type(module), leaf_of(f"{name}.weight").split]
            model.set_submodule(name, split(module, name, mesh, ranks))
