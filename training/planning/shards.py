"""Which parameters a rank holds, exactly: names, shapes, and how they are split."""

from typing import NamedTuple

from common.settings import ModelSettings
from training.parallel.stages import stage_layers
from training.parallel.vocabulary import padded_vocab_size
from training.planning.layout import Layout


class Held(NamedTuple):
    """Elements of parameters that one rank holds, in each layer and outside the layers."""

    layers: int
    layer: int
    root: int
    """Embeddings and the last LayerNorm: FSDP's root group."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.layers * self.layer + self.root


def layer_shapes(model: ModelSettings, tensor: int) -> dict[str, tuple[int, ...]]:
    """The shapes of one layer's parameters on a tensor-parallel rank.

    c_attn and c_fc are split by rows, both c_proj by columns; LayerNorms and the biases of c_proj are on every rank.
    """
    width = model.n_embd
    return {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (3 * width // tensor, width),
        "attn.c_attn.bias": (3 * width // tensor,),
        "attn.c_proj.weight": (width, width // tensor),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (4 * width // tensor, width),
        "mlp.c_fc.bias": (4 * width // tensor,),
        "mlp.c_proj.weight": (width, 4 * width // tensor),
        "mlp.c_proj.bias": (width,),
    }


def root_shapes(model: ModelSettings, tensor: int, first: bool, last: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters outside the layers: wte is on the first and on the last stage."""
    width = model.n_embd
    shapes: dict[str, tuple[int, ...]] = {}
    if first or last:
        shapes["wte.weight"] = (padded_vocab_size(model.vocab_size, tensor) // tensor, width)
    if first:
        shapes["wpe.weight"] = (model.seq_len, width)
    if last:
        shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return shapes


def rank_layers(model: ModelSettings, layout: Layout, rank: int) -> int:
    """The layers of a pipeline rank, in all of its stages."""
    if layout.pipeline == 1:
        return model.n_layer
    stages = layout.stages
    if not model.n_layer % stages:
        return model.n_layer // layout.pipeline
    return sum(len(layers) for layers in stage_layers(model.n_layer, stages)[rank :: layout.pipeline])


def held(model: ModelSettings, layout: Layout, rank: int, shares: int = 1) -> Held:
    """What a pipeline rank holds, if its parameters are split over `shares` data-parallel ranks; of those the first.

    FSDP splits each parameter by rows, rounded up: the first rank is the fullest. This is `layer_shapes` and
    `root_shapes` in closed form, because the search asks ten thousand times.
    """
    width, tensor = model.n_embd, layout.tensor
    first, last = rank == 0, rank == layout.pipeline - 1
    vectors, wide = -(-width // shares), -(-4 * width // tensor // shares)
    qkv = -(-3 * width // tensor // shares)
    layer = (qkv + wide) * (width + 1) + vectors * (width // tensor + 4 * width // tensor + 6)
    root = 0
    if first or last:
        root = -(-padded_vocab_size(model.vocab_size, tensor) // tensor // shares) * width
    if first:
        root += -(-model.seq_len // shares) * width
    if last:
        root += 2 * vectors
    return Held(rank_layers(model, layout, rank), layer, root)


def rank_parameters(model: ModelSettings, layout: Layout, rank: int = 0) -> int:
    """Elements of parameters on the fullest rank of a pipeline stage, whole or, from ZeRO 1 on, its shards."""
    return held(model, layout, rank, layout.data if layout.zero_stage else 1).total
