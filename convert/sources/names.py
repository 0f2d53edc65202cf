"""Tensor names of Megatron (2019 to today), DeepSpeed and Hugging Face -> ours: Hugging Face's, no `transformer.`."""

import re
from typing import Literal, NamedTuple

from training.tensors import LAYER_LEAVES, ROOT_LEAVES

Family = Literal["megatron", "transformers"]

_TOP, _LAYERS = (
    {f"{theirs}.{leaf.kind}": leaf.name for leaf in leaves.values() for theirs in leaf.module.megatron}
    for leaves in (ROOT_LEAVES, LAYER_LEAVES)
)
_LAYERS |= {leaf.module.folded + leaf.kind: leaf.name for leaf in LAYER_LEAVES.values() if leaf.module.folded}
_PREFIX = re.compile(
    r"(?:module|model|language_model|encoder|decoder|transformer|embedding|tied_modules\.[^.]+"
    r"|_forward_module|_orig_mod)\."  # of Lightning and of torch.compile
)
_LAYER = re.compile(r"(layers|h)\.(?:(\d+)\.)?(.+)")
_IGNORED = re.compile(r"_extra_state(/|$)|\.attn\.(masked_)?bias$|^rng_state(/|$)|attention\.(masked_)?bias$")


class Name(NamedTuple):
    """A tensor of GPT-2."""

    leaf: str
    """`wte.weight`, or without the layer `mlp.c_fc.weight`."""
    layer: int | None
    """The number in the name; None for embeddings, the last norm and tensors that stack all layers."""
    family: Family
    stacked: bool = False
    """The first dimension is the layer."""

    def ours(self, first_layer: int = 0) -> str:
        """`h.7.mlp.c_fc.weight` for layer 3 of a stage whose first layer is 4."""
        return self.leaf if self.layer is None else f"h.{first_layer + self.layer}.{self.leaf}"


def parse(key: str) -> Name | None:
    """The tensor that a key of a checkpoint names; None for what is no weight. Raises KeyError for an unknown key."""
    if _IGNORED.search(key):
        return None
    bare = key
    while found := _PREFIX.match(bare):
        bare = bare[found.end() :]
    if bare == "word_embeddings_for_head.weight":  # the last pipeline stage's copy
        return Name("wte.weight", None, "megatron")
    if bare in _TOP:
        return Name(_TOP[bare], None, "megatron")
    if bare in ROOT_LEAVES:
        return Name(bare, None, "transformers")
    if found := _LAYER.fullmatch(bare):
        group, number, rest = found.groups()
        layer = None if number is None else int(number)
        if group == "layers" and rest in _LAYERS:
            return Name(_LAYERS[rest], layer, "megatron", layer is None)
        if group == "h" and layer is not None and rest in LAYER_LEAVES:
            return Name(rest, layer, "transformers")
    raise KeyError(key)
