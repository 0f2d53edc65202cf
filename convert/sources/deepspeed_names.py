"""What the keys of DeepSpeed's tensors name: those of transformers, of Megatron, or of a pipeline's modules.

A pipeline numbers its modules: `3.input_layernorm.weight` is a tensor of layer_03-model_*; blocks are consecutive, and
the last norm (`8.weight`) comes after them. `tied_modules.embed.word_embeddings.weight` is in the first and last stage.
"""

import re
from collections.abc import Mapping, Sequence

from common.errors import CheckpointError
from convert.sources.names import Name, parse
from convert.sources.ranks import join_ranks, join_stages
from convert.sources.source import Sharded
from convert.stored import Stored
from training.tensors import HEAD, leaf_of

Stages = Sequence[tuple[str, Sequence[Mapping[str, Stored]]]]
"""Stages of a pipeline (or its modules): a name, and the tensors of each tensor rank by key."""
_MODULE = re.compile(r"(?:module\.)?(\d+)\.(.+)")
_NORM = re.compile(r"(?:norm\.|final_layernorm\.|ln_f\.)?(weight|bias)")
_HEAD = re.compile(r"(?:lm_head|final_linear|output_layer)\.weight")  # final_linear: GPT-NeoX


def translate(stages: Stages, shared: Mapping[str, str]) -> dict[str, Name]:
    """What the keys mean; the number of a pipeline's module becomes that of the layer.

    `shared` are the second names of parameters with the first ones; a tied embedding's or head's is left out. Raises
    CheckpointError for an unknown key, or if names of both families are there.
    """
    found: dict[str, Name] = {}
    for key in dict.fromkeys(key for _, ranks in stages for rank in ranks for key in rank):
        name = _parse(key)
        if name is None or (key in shared and name.leaf in ("wte.weight", HEAD)):
            continue
        if name.leaf == HEAD and key in shared.values():
            name = name._replace(leaf="wte.weight")  # the head came first, and the embedding is its second name
        found[key] = name
    if len({name.family for name in found.values() if name.layer is not None}) > 1:
        raise CheckpointError("names of Megatron beside names of transformers; remove the files of the other model")
    blocks = {
        key: number for key, name in found.items() if name.layer is not None and (number := module_of(key)) is not None
    }
    first = min(blocks.values(), default=0)
    return found | {key: found[key]._replace(layer=number - first) for key, number in blocks.items()}


def _parse(key: str) -> Name | None:
    """The tensor that a key names; None for what is no weight. Raises CheckpointError for an unknown key."""
    module = _MODULE.fullmatch(key)
    rest = module[2] if module else key
    if module and (norm := _NORM.fullmatch(rest)):
        return Name(f"ln_f.{norm[1]}", None, "megatron")
    if module and _HEAD.fullmatch(rest):
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


def is_conv1d(stages: Stages, names: Mapping[str, Name]) -> bool:
    """Whether the matrices are [in, out]: their output has the length of the bias."""
    for _, ranks in stages:
        tensors = {names[key].ours(): tensor for key, tensor in ranks[0].items() if key in names}
        for name, weight in tensors.items():
            bias = tensors.get(name.removesuffix("weight") + "bias")
            leaf = leaf_of(name)
            if leaf.conv1d and leaf.split == 0 and bias and weight.shape[0] != weight.shape[-1]:
                return weight.shape[-1] == bias.shape[0]
    return True


def join(stages: Stages, names: Mapping[str, Name], conv1d: bool) -> dict[str, Sharded]:
    """The model's tensors from those of every stage and tensor rank. Raises CheckpointError if they do not fit."""
    joined: list[tuple[str, dict[str, Sharded]]] = []
    for stage, ranks in stages:
        renamed = [_renamed(rank, names) for rank in ranks]
        if any("wpe.weight" in tensors for _, tensors in joined):
            for rank in renamed:
                rank.pop("wpe.weight", None)  # tied with its module, and not used in the last stage
        joined.append((stage, join_ranks(renamed, conv1d)))
    return join_stages(joined)


def _renamed(tensors: Mapping[str, Stored], names: Mapping[str, Name]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for key, tensor in tensors.items():
        if key in names:
            if (name := names[key].ours()) in found:
                raise CheckpointError(f"tensor {name!r} is there twice, the second time as {key!r}")
            found[name] = tensor
    return found
