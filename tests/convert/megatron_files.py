"""Megatron-LM checkpoints of all versions, from tables of names, split dimensions and qkv rows.

    write(tmp_path / "iter_0000100", Layout("core", version=3.0, tensor=2, pipeline=2))

Nothing here uses `convert`, whose readers and writers these files are for.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convert.sources.source import Architecture
from tests.convert.encoded import SMALL, truth

FILE = "model_optim_rng.pt"
OLD_LAYER = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}
ENCODER_LAYER = {name: theirs.replace("attention.", "self_attention.") for name, theirs in OLD_LAYER.items()}
CORE_LAYER = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "self_attention.linear_qkv",
    "attn.c_proj": "self_attention.linear_proj",
    "ln_2": "pre_mlp_layernorm",
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.c_proj": "mlp.linear_fc2",
}
FOLDED_LAYER = {**CORE_LAYER, "ln_1": "self_attention.linear_qkv.layer_norm", "ln_2": "mlp.linear_fc1.layer_norm"}
# where the embeddings lie, where layers and the last norm lie, and the names in a layer
_PLACES = {
    "2019": ("", "transformer.", OLD_LAYER),
    "transformer": ("language_model.embedding.", "language_model.transformer.", OLD_LAYER),
    "encoder": ("language_model.embedding.", "language_model.encoder.", ENCODER_LAYER),
    "core": ("embedding.", "decoder.", CORE_LAYER),
    "folded": ("embedding.", "decoder.", FOLDED_LAYER),
}
SPLIT = {
    "wte.weight": 0,
    "lm_head.weight": 0,
    "attn.c_attn.weight": 0,
    "attn.c_attn.bias": 0,
    "attn.c_proj.weight": 1,
    "mlp.c_fc.weight": 0,
    "mlp.c_fc.bias": 0,
    "mlp.c_proj.weight": 1,
}


@dataclass(frozen=True)
class Layout:
    """What a training chose, and which version of Megatron-LM it used."""

    names: str = "2019"
    """2019, transformer or encoder (in language_model), core, folded (norms in linear layers)."""
    version: float | None = None
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    """Interleaved models per stage."""
    counts: tuple[int, ...] = ()
    """Layers per chunk, in the model's order; empty: equal shares."""
    numbered_globally: bool = False
    model: Architecture = SMALL
    dtype: torch.dtype = torch.float32
    iteration: int | None = 100
    args: Mapping[str, Any] | None = None
    """None: none for the 2019 names, else what Megatron-LM records; an empty mapping: no args."""
    padding: str = "zeros"
    """Of the embedding: zeros, or last (its last row again, as in Megatron-LM's converter)."""


def padded(model: Architecture, tensor: int) -> int:
    """Rows of the embedding: a multiple of 128 times the tensor ranks."""
    return -(-model.vocab_size // (128 * tensor)) * 128 * tensor


def recorded_args(layout: Layout) -> dict[str, Any]:
    """Some of the arguments that Megatron-LM records."""
    model, sizes = layout.model, {"model_parallel_size": layout.tensor}
    if (layout.version or 0) >= 2:
        sizes = {"tensor_model_parallel_size": layout.tensor, "pipeline_model_parallel_size": layout.pipeline}
        sizes |= {"virtual_pipeline_model_parallel_size": layout.chunks} if layout.chunks > 1 else {}
    return {
        "num_layers": model.n_layer,
        "hidden_size": model.n_embd,
        "num_attention_heads": model.n_head,
        "kv_channels": model.n_embd // model.n_head,
        "max_position_embeddings": model.n_positions,
        "padded_vocab_size": padded(model, layout.tensor),
        "vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": 128,
        "layernorm_epsilon": 1e-5,
        "hidden_dropout": 0.1,
        "bias_gelu_fusion": True,
        "openai_gelu": False,
        "params_dtype": layout.dtype,
        "consumed_train_samples": 6400,
        "untie_embeddings_and_output_weights": not model.tied,
        "rank": 0,
        **sizes,
    }


def qkv_rows(rows: Tensor, version: float, tensor: int, rank: int, n_head: int) -> Tensor:
    """A rank's rows of c_attn, from rows [head, (q, k, v), dim]."""
    heads = n_head // tensor
    parts = rows.view(n_head, 3, -1, *rows.shape[1:])[rank * heads : (rank + 1) * heads]  # (heads, 3, dim, …)
    if version == 0:
        parts = parts.transpose(0, 1)  # (3, heads, dim, …)
    elif version == 1:
        parts = parts.transpose(1, 2)  # (heads, dim, 3, …)
    return parts.reshape(-1, *rows.shape[1:])


def shard(name: str, whole: Tensor, layout: Layout, rank: int) -> Tensor:
    """A rank's part of one of our tensors."""
    leaf = name.split(".", 2)[2] if name.startswith("h.") else name
    if leaf in ("wte.weight", "lm_head.weight"):
        count = padded(layout.model, layout.tensor) - len(whole)
        rows = torch.zeros(count, whole.shape[1]) if layout.padding == "zeros" else whole[-1:].repeat(count, 1)
        whole = torch.cat([whole, rows])
    if leaf.startswith("attn.c_attn"):
        part = qkv_rows(whole, layout.version or 0, layout.tensor, rank, layout.model.n_head)
    elif leaf in SPLIT:
        part = whole.chunk(layout.tensor, SPLIT[leaf])[rank]
    else:
        part = whole
    return part.to(layout.dtype).clone()


def key_of(name: str, names: str, first: int = 0) -> str:
    """The key of one of our tensors, if the file counts its layers from our layer `first`."""
    embedding, body, layer_names = _PLACES[names]
    if name.startswith("h."):
        _, layer, stem = name.split(".", 2)
        stem, kind = stem.rsplit(".", 1)
        separator = "_" if layer_names[stem].endswith("layer_norm") else "."
        return f"{body}layers.{int(layer) - first}.{layer_names[stem]}{separator}{kind}"
    if name.startswith("ln_f."):
        return f"{body}final_layernorm.{name[5:]}"
    if name == "lm_head.weight":
        return f"{'' if embedding == 'embedding.' else 'language_model.'}output_layer.weight"
    return f"{embedding}{'word' if name == 'wte.weight' else 'position'}_embeddings.weight"


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`language_model`, its parts and each embedding as dicts; their tensors have flat names."""
    tree: dict[str, Any] = {}
    for key, tensor in flat.items():
        parts = key.split(".", 3 if ".embedding." in key else 2)
        place = tree
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = tensor
    return tree


def _chunk_state(
    layout: Layout, weights: Mapping[str, Tensor], rank: int, first: int, last: int, ends: tuple[bool, bool]
) -> dict[str, Any]:
    """One `model`: layers `first` to before `last`, embedding and head if it is at the ends."""
    starts, stops = ends
    core = layout.names in ("core", "folded")
    state: dict[str, Any] = {}
    for name, whole in weights.items():
        is_here = starts if name in ("wte.weight", "wpe.weight") else stops
        if name.startswith("h."):
            is_here = first <= int(name.split(".")[1]) < last
        if is_here:
            key = key_of(name, layout.names, 0 if layout.numbered_globally else first)
            state[key] = shard(name, whole, layout, rank)
    if stops and not starts and "lm_head.weight" not in weights and layout.names != "2019":  # its own for the head
        key = "output_layer.weight" if core else "word_embeddings_for_head.weight"
        state[key] = shard("wte.weight", weights["wte.weight"], layout, rank)
    if core and stops:
        state["output_layer._extra_state"] = None
    return nested(state) if layout.names in ("transformer", "encoder") else state


def content_of(layout: Layout, weights: Mapping[str, Tensor], stage: int, rank: int) -> dict[str, Any]:
    """What is in one rank's file."""
    total = layout.pipeline * layout.chunks
    counts = layout.counts or (layout.model.n_layer // total,) * total
    assert sum(counts) == layout.model.n_layer and len(counts) == total
    content: dict[str, Any] = {}
    for chunk in range(layout.chunks):
        index = chunk * layout.pipeline + stage
        first, ends = sum(counts[:index]), (index == 0, index == total - 1)
        state = _chunk_state(layout, weights, rank, first, first + counts[index], ends)
        content[f"model{chunk}" if layout.chunks > 1 else "model"] = state
    if layout.iteration is not None:
        content["iteration"] = layout.iteration
    if layout.version is not None:
        content["checkpoint_version"] = layout.version
    args = layout.args if layout.args is not None else ({} if layout.names == "2019" else recorded_args(layout))
    return content | ({"args": Namespace(**args)} if args else {})


def folder_name(layout: Layout, stage: int, rank: int) -> str:
    """`mp_rank_01`, or with pipeline stages `mp_rank_01_003`."""
    return f"mp_rank_{rank:02d}" if layout.pipeline == 1 else f"mp_rank_{rank:02d}_{stage:03d}"


def write(folder: Path, layout: Layout) -> Path:
    """All files of a checkpoint, with the 2019 names in the format before torch 1.6."""
    for stage in range(layout.pipeline):
        for rank in range(layout.tensor):
            content = content_of(layout, truth(layout.model), stage, rank)
            path = folder / folder_name(layout, stage, rank) / FILE
            path.parent.mkdir(parents=True)
            torch.save(content, path, _use_new_zipfile_serialization=layout.names != "2019")
    return folder
