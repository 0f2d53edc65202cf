"""Tensor names of Megatron, DeepSpeed and Hugging Face -> ours, Hugging Face's without a prefix.

DeepSpeed's pipelines number their modules: `3.input_layernorm.weight` is a tensor of
layer_03-model_*; blocks are consecutive, and the last norm (`8.weight`) comes after them.
`tied_modules.embed.word_embeddings.weight` is in the first and the last stage.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from common.errors import CheckpointError
from training.tensors import HEAD, LAYER_LEAVES, ROOT_LEAVES

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

_MODULE = re.compile(r"(?:module\.)?(\d+)\.(.+)")
_MODULE_NORM = re.compile(r"(?:norm\.|final_layernorm\.|ln_f\.)?(weight|bias)")
_MODULE_HEAD = re.compile(r"(?:lm_head|final_linear|output_layer)\.weight")  # final_linear: GPT-NeoX


class Name(NamedTuple):
    """A tensor of GPT-2."""

    leaf: str
    """`wte.weight`, or without the layer `mlp.c_fc.weight`."""
    layer: int | None
    """The number in the name; None for tensors outside the layers, or stacked ones."""
    family: Family
    stacked: bool = False
    """The first dimension is the layer."""

    def ours(self, first_layer: int = 0) -> str:
        """`h.7.mlp.c_fc.weight` for layer 3 of a stage whose first layer is 4."""
        return self.leaf if self.layer is None else f"h.{first_layer + self.layer}.{self.leaf}"


def parse(key: str) -> Name | None:
    """The tensor that a key names; None if it is no weight. Raises KeyError for an unknown key."""
    if _IGNORED.search(key):
        return None
    bare = key
    while prefix := _PREFIX.match(bare):
        bare = bare[prefix.end() :]
    if bare == "word_embeddings_for_head.weight":  # the last pipeline stage's copy
        return Name("wte.weight", None, "megatron")
    if bare in _TOP:
        return Name(_TOP[bare], None, "megatron")
    if bare in ROOT_LEAVES:
        return Name(bare, None, "transformers")
    if match := _LAYER.fullmatch(bare):
        group, number, rest = match.groups()
        layer = None if number is None else int(number)
        if group == "layers" and rest in _LAYERS:
            return Name(_LAYERS[rest], layer, "megatron", layer is None)
        if group == "h" and layer is not None and rest in LAYER_LEAVES:
            return Name(rest, layer, "transformers")
    raise KeyError(key)


def translate(keys: Iterable[str], shared: Mapping[str, str]) -> dict[str, Name]:
    """The tensors that DeepSpeed's keys name; a pipeline module's number becomes that of the layer.

    `shared` has the first name of a parameter by its second one; the second one of a tied embedding
    or head is left out. Raises CheckpointError for an unknown key, or for names of both families.
    """
    names: dict[str, Name] = {}
    for key in dict.fromkeys(keys):
        name = _parse_module(key)
        if name is None or (key in shared and name.leaf in ("wte.weight", HEAD)):
            continue
        if name.leaf == HEAD and key in shared.values():
            name = name._replace(leaf="wte.weight")  # the head came first, and the embedding is its second name
        names[key] = name
    if len({name.family for name in names.values() if name.layer is not None}) > 1:
        raise CheckpointError("names of Megatron beside names of transformers; remove the files of the other model")
    blocks = {
        key: number for key, name in names.items() if name.layer is not None and (number := module_of(key)) is not None
    }
    first = min(blocks.values(), default=0)
    return names | {key: names[key]._replace(layer=number - first) for key, number in blocks.items()}


def _parse_module(key: str) -> Name | None:
    """`parse`, also for a key of a pipeline's module. Raises CheckpointError for an unknown key."""
    module = _MODULE.fullmatch(key)
    rest = module[2] if module else key
    if module and (norm := _MODULE_NORM.fullmatch(rest)):
        return Name(f"ln_f.{norm[1]}", None, "megatron")
    if module and _MODULE_HEAD.fullmatch(rest):
        return Name(HEAD, None, "megatron")
    for prefix in ("", "layers.0.", "h.0.") if module else ("",):
        try:
            return parse(prefix + rest)
        except KeyError:
            continue
    raise CheckpointError(f"unknown tensor {key!r}: the model is no GPT-2, or its names are not known")


def module_of(key: str) -> int | None:
    """The number of the pipeline's module that a key names."""
    module = _MODULE.fullmatch(key)
    return int(module[1]) if module else None
