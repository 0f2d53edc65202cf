"""Tensor names of Megatron (2019 to today), DeepSpeed and Hugging Face -> ours: Hugging Face's, no `transformer.`."""

import re
from typing import Literal, NamedTuple

Family = Literal["megatron", "transformers"]

# today's names and the older ones of the same tensor
_MEGATRON = {
    "input_layernorm": "ln_1",
    "input_norm": "ln_1",  # Megatron-LM's own model since September 2023
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.query_key_value": "attn.c_attn",
    "attention.query_key_value": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "self_attention.dense": "attn.c_proj",
    "attention.dense": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "post_attention_layernorm": "ln_2",
    "post_attention_norm": "ln_2",
    "post_self_attn_layernorm": "ln_2",  # Megatron-core in 2023
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}
_FOLDED = {"self_attention.linear_qkv.layer_norm_": "ln_1.", "mlp.linear_fc1.layer_norm_": "ln_2."}
_TOP = {
    "word_embeddings.weight": "wte.weight",
    "position_embeddings.weight": "wpe.weight",
    "final_layernorm.weight": "ln_f.weight",
    "final_layernorm.bias": "ln_f.bias",
    "final_norm.weight": "ln_f.weight",
    "final_norm.bias": "ln_f.bias",
    "output_layer.weight": "lm_head.weight",
}
_HUGGING_FACE_TOP = {"wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias", "lm_head.weight"}
_HUGGING_FACE = {"ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"}
_PREFIX = re.compile(r"(?:module|model|language_model|encoder|decoder|transformer|embedding)\.")
_LAYER = re.compile(r"(layers|h)\.(?:(\d+)\.)?(.+)\.?(weight|bias)")
_IGNORED = re.compile(r"_extra_state(/|$)|\.attn\.(masked_)?bias$|^rng_state(/|$)|attention\.(masked_)?bias$")

COPY_OF_WTE = ("word_embeddings_for_head.weight",)
"""Names of the last pipeline stage's copy of the token embedding."""


class Name(NamedTuple):
    """A tensor of GPT-2."""

    leaf: str
    """`wte.weight`, or without the layer `attn.c_attn.weight`."""
    layer: int | None
    """The number in the name; None for embeddings, the last norm and tensors that stack all layers."""
    family: Family
    stacked: bool = False
    """The first dimension is the layer."""
    folded: bool = False
    """A LayerNorm under the name of the linear layer after it."""

    def ours(self, first_layer: int = 0) -> str:
        """`h.7.attn.c_attn.weight` for layer 3 of a stage whose first layer is 4."""
        return self.leaf if self.layer is None else f"h.{first_layer + self.layer}.{self.leaf}"


def parse(key: str) -> Name | None:
    """The tensor that a key of a checkpoint names; None for what is no weight. Raises KeyError for an unknown key."""
    if _IGNORED.search(key):
        return None
    bare = key
    while found := _PREFIX.match(bare):
        bare = bare[found.end() :]
    if bare in COPY_OF_WTE:
        return Name("wte.weight", None, "megatron")
    if bare in _TOP:
        return Name(_TOP[bare], None, "megatron")
    if bare in _HUGGING_FACE_TOP:
        return Name(bare, None, "transformers")
    if found := _LAYER.fullmatch(bare):
        group, number, stem, kind = found.groups()
        layer = None if number is None else int(number)
        if group == "layers":
            for start, norm in _FOLDED.items():
                if f"{stem}{kind}" == f"{start}{kind}":
                    return Name(norm + kind, layer, "megatron", layer is None, True)
            if stem.removesuffix(".") in _MEGATRON:
                return Name(f"{_MEGATRON[stem.removesuffix('.')]}.{kind}", layer, "megatron", layer is None)
        elif layer is not None and stem.removesuffix(".") in _HUGGING_FACE:
            return Name(f"{stem.removesuffix('.')}.{kind}", layer, "transformers")
    raise KeyError(key)
