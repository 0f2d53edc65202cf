"""THE table of GPT-2's tensors: names, shapes, tensor-parallel split, names in other formats.

Every reader, writer, layout and prediction uses it, except `convert.proof`, which checks them.
Names are Hugging Face's without `transformer.` (`wte.weight`, `h.0.attn.c_attn.weight`, …). Rows
of the query, key and value matrix are ordered [head, (q, k, v), dim]. Imports no torch.
"""

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

QKV = "attn.c_attn"
"""The module whose rows belong to heads; formats differ in their order."""
HEAD = "lm_head.weight"
VOCABULARY = ("wte.weight", HEAD)
"""The tensors with a row per token, and padding rows."""
HUGGING_FACE_PREFIX = "transformer."
_NAME = re.compile(r"h\.(\d+)\.(.+)")


class Module(NamedTuple):
    """A module with a weight and, unless it is an embedding, a bias with one number per row."""

    name: str
    kind: Literal["embedding", "norm", "linear"]
    shape: tuple[str, ...]
    """The weight's, [out, in] for a matrix; see `Sizes`."""
    split: int | None
    """The dimension of the weight that tensor-parallel ranks split; None if it is not split.
    The bias is split with the rows. A matrix split by columns writes to the residual stream."""
    core: str
    """Megatron-LM's name today."""
    fork_2019: str
    """Its name in 2019, still DeepSpeed's."""
    llama: str
    """llama.cpp's name."""
    others: tuple[str, ...] = ()
    """Megatron-LM's names in between."""
    folded: str = ""
    """The names' prefix if Megatron-core folds the norm into the linear layer after it."""

    @property
    def megatron(self) -> tuple[str, ...]:
        """All of Megatron-LM's names."""
        return self.core, self.fork_2019, *self.others


# fmt: off
ROOT = (
    Module("wte", "embedding", ("vocabulary", "width"), 0, *("word_embeddings",) * 2, "token_embd"),
    Module("wpe", "embedding", ("positions", "width"), None, *("position_embeddings",) * 2, "position_embd"),
    Module("ln_f", "norm", ("width",), None, *("final_layernorm",) * 2, "output_norm", ("final_norm",)),
    Module("lm_head", "embedding", ("vocabulary", "width"), 0, *("output_layer",) * 2, "output"),  # if it is not tied
)
LAYER = (
    Module("ln_1", "norm", ("width",), None, "input_layernorm", "input_layernorm", "attn_norm",
           ("input_norm",), "self_attention.linear_qkv.layer_norm_"),
    Module(QKV, "linear", ("qkv", "width"), 0, "self_attention.linear_qkv", "attention.query_key_value", "attn_qkv",
           ("self_attention.query_key_value",)),
    Module("attn.c_proj", "linear", ("width", "width"), 1, "self_attention.linear_proj", "attention.dense",
           "attn_output", ("self_attention.dense",)),
    Module("ln_2", "norm", ("width",), None, "pre_mlp_layernorm", "post_attention_layernorm", "ffn_norm",
           ("post_attention_norm", "post_self_attn_layernorm"), "mlp.linear_fc1.layer_norm_"),
    Module("mlp.c_fc", "linear", ("inner", "width"), 0, "mlp.linear_fc1", "mlp.dense_h_to_4h", "ffn_up"),
    Module("mlp.c_proj", "linear", ("width", "inner"), 1, "mlp.linear_fc2", "mlp.dense_4h_to_h", "ffn_down"),
)
# fmt: on


class Sizes(NamedTuple):
    """The sizes of one model, for the shapes in the table."""

    width: int
    inner: int
    """Width of the MLP: 4 * width in our models."""
    positions: int
    vocabulary: int
    """Rows of the embedding, with or without padding."""

    @property
    def qkv(self) -> int:
        """Rows of the query, key and value matrix."""
        return 3 * self.width


class Leaf(NamedTuple):
    """One tensor, of the model or of each layer."""

    name: str
    """`wte.weight`; without its layer, `attn.c_proj.bias`."""
    module: Module
    kind: str
    """`weight` or `bias`."""
    dims: tuple[str, ...]
    split: int | None

    @property
    def conv1d(self) -> bool:
        """Whether it is a matrix that Hugging Face's Conv1D stores [in, out]."""
        return self.module.kind == "linear" and len(self.dims) == 2

    def shape(self, sizes: Sizes, conv1d: bool = False) -> tuple[int, ...]:
        """The whole tensor's; with `conv1d` that of a Conv1D."""
        shape = tuple(getattr(sizes, dim) for dim in self.dims)
        return shape[::-1] if conv1d and self.conv1d else shape


def _leaves(modules: tuple[Module, ...]) -> dict[str, Leaf]:
    leaves = []
    for module in modules:
        leaves.append(Leaf(f"{module.name}.weight", module, "weight", module.shape, module.split))
        if module.kind != "embedding":
            split = 0 if module.split == 0 else None
            leaves.append(Leaf(f"{module.name}.bias", module, "bias", module.shape[:1], split))
    return {leaf.name: leaf for leaf in leaves}


ROOT_LEAVES: Mapping[str, Leaf] = _leaves(ROOT)
LAYER_LEAVES: Mapping[str, Leaf] = _leaves(LAYER)


def leaf_of(name: str) -> Leaf:
    """The table's entry for `h.3.attn.c_proj.bias`. Raises KeyError for an unknown tensor."""
    match = _NAME.fullmatch(name)
    return LAYER_LEAVES[match[2]] if match else ROOT_LEAVES[name]


def layer_of(name: str) -> int | None:
    """3 for `h.3.attn.c_proj.bias`; None for a tensor outside the layers."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def all_names(n_layer: int, tied: bool = True) -> list[str]:
    """The names of a model's tensors; a head that is not tied has its own."""
    layers = [f"h.{layer}.{leaf}" for layer in range(n_layer) for leaf in LAYER_LEAVES]
    return [*(name for name in ROOT_LEAVES if not (tied and name == HEAD)), *layers]


def hugging_face_name(name: str) -> str:
    """`transformer.wte.weight`; the head is outside of the transformer."""
    return name if name == HEAD else HUGGING_FACE_PREFIX + name


def llama_name(name: str) -> str:
    """`token_embd.weight`, `blk.3.attn_output.bias`."""
    leaf, layer = leaf_of(name), layer_of(name)
    return f"{'' if layer is None else f'blk.{layer}.'}{leaf.module.llama}.{leaf.kind}"
