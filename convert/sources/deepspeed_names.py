"""What the keys of DeepSpeed's files mean: modules of a pipeline, tied weights, the order of the qkv rows.

A pipeline numbers its modules: `3.input_layernorm.weight` is a tensor of layer_03-model_*; blocks are consecutive, and
the last norm (`8.weight`) comes after them. `tied_modules.embed.word_embeddings.weight` is in the first and last stage.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import CheckpointError
from convert.files.stored import LoadedTensor, StoredTensor
from convert.sources.deepspeed_files import State, tensors_of
from convert.sources.names import Family, Name, parse
from convert.sources.options import Options
from convert.sources.source import QKV
from convert.sources.zero_optimizer import number_in

_WRAPPER = re.compile(r"(?:_forward_module\.|_orig_mod\.)+")  # of Lightning and of torch.compile
_TIED = re.compile(r"(?:module\.)?tied_modules\.[^.]+\.(.+)")
_MODULE = re.compile(r"(?:module\.)?(\d+)\.(.+)")
_NORM = re.compile(r"(?:norm\.|final_layernorm\.|ln_f\.)?(weight|bias)")
_HEAD = re.compile(r"(?:lm_head|final_linear|output_layer)\.weight")  # final_linear: GPT-NeoX
_EMBEDDING = re.compile(r"(?:.*\.)?(?:wte|lm_head|word_embeddings|word_embeddings_for_head|output_layer)\.weight")
_2019 = re.compile(r"(?:module\.)*transformer\.layers\.\d+\.attention\.query_key_value\.weight")


@dataclass(frozen=True)
class Names:
    """The keys that name weights."""

    ours: Mapping[str, str]
    """Our name by key."""
    family: Family
    is_2019: bool
    """Megatron's names of 2019, which mean version 0 if no other is recorded."""


def translate(keys: Iterable[str], second_names: Mapping[str, str]) -> Names:
    """Understand all keys of a checkpoint; second names of a tensor (see `aliases`) are left out.

    Raises CheckpointError for an unknown key or a lost block.
    """
    found: dict[str, Name] = {}
    blocks: dict[str, int] = {}  # the number of the pipeline's module, for each key of a block
    for key in keys:
        try:
            name = parse_key(key)
        except KeyError:
            raise CheckpointError(
                f"unknown tensor {key!r}: the model is no GPT-2, or its names are not known"
            ) from None
        if name is None or key in second_names:
            continue
        if name.leaf == "lm_head.weight" and key in second_names.values():
            name = name._replace(leaf="wte.weight")  # the head came first, and the embedding is its second name
        found[key] = name
        if name.layer is not None and (number := module_of(key)) is not None:
            blocks[key] = number
    first = min(blocks.values(), default=0)
    if lost := sorted(set(range(first, max(blocks.values(), default=first))) - set(blocks.values())):
        raise CheckpointError(f"no layer_{lost[0]:02d}-model_*: a block of the pipeline; copy every file of the save")
    families = {name.family for name in found.values() if name.layer is not None}
    if len(families) > 1:
        raise CheckpointError("names of Megatron beside names of transformers; remove the files of the other model")
    return Names(
        ours={
            key: f"h.{blocks[key] - first}.{name.leaf}" if key in blocks else name.ours() for key, name in found.items()
        },
        family=families.pop() if families else "megatron",
        is_2019=any(_2019.fullmatch(_WRAPPER.sub("", key)) for key in found),
    )


def parse_key(key: str) -> Name | None:
    """The tensor that a key names; None for what is no weight. Raises KeyError for an unknown key."""
    bare = _WRAPPER.sub("", key)
    if tied := _TIED.fullmatch(bare):
        return parse(tied[1])
    module = _MODULE.fullmatch(bare)
    return _parse_in_module(module[2]) if module else parse(bare)


def module_of(key: str) -> int | None:
    """The number of the pipeline's module that a key names."""
    module = _MODULE.fullmatch(_WRAPPER.sub("", key))
    return int(module[1]) if module else None


def aliases(states: Iterable[State]) -> dict[str, str]:
    """The keys of a tied embedding or head, with the key that each is a second name of.

    Other tensors may share their storage by chance: a file may have one tensor of zeros for many biases.
    """
    found: dict[str, str] = {}
    for state in states:
        shared = state.get("shared_params")  # rank 0 alone records them, and none below ZeRO 1
        pairs: Any = shared.items() if isinstance(shared, Mapping) else shared
        found |= {pair[0]: pair[1] for pair in pairs or () if len(pair) == 2 and _EMBEDDING.fullmatch(pair[0])}
        places: dict[Any, str] = {}
        for key, tensor in tensors_of(state.get("module")).items():
            if not _EMBEDDING.fullmatch(key):
                continue
            match tensor:
                case StoredTensor(path=path, offset=offset, shape=shape) if 0 not in shape:
                    place: Any = (path, offset, shape)
                case LoadedTensor(tensor=loaded) if loaded.numel():
                    place = (loaded.data_ptr(), tuple(loaded.shape))
                case _:
                    continue
            first = places.setdefault(place, key)
            if key != first and first not in found:
                found.setdefault(key, first)
    return found


def qkv_order(names: Names, state: State, args: Mapping[str, Any], options: Options, tensor_ranks: int) -> QKV:
    """The order of the qkv rows. Raises CheckpointError if neither the checkpoint nor the options say it."""
    if names.family == "transformers":
        if options.qkv_version not in (None, 0):
            raise CheckpointError(
                f"--qkv-version {options.qkv_version}: names of transformers mean version 0; leave the option out"
            )
        return QKV(0, tensor_ranks)
    version = number_in(state.get("checkpoint_version", args.get("checkpoint_version")))
    if version is not None and version not in range(4):
        raise CheckpointError(f"checkpoint_version is {version}; 0 to 3 are known")
    if version is None:
        version = 0 if names.is_2019 and options.qkv_version is None else options.qkv_version
    elif options.qkv_version is not None and QKV(options.qkv_version) != QKV(version):
        raise CheckpointError(f"--qkv-version is {options.qkv_version}, but checkpoint_version is {version}")
    if version is None:
        raise CheckpointError("the order of the qkv rows is not recorded (no checkpoint_version); give --qkv-version")
    return QKV(version, tensor_ranks)


def _parse_in_module(rest: str) -> Name | None:
    """The tensor of a pipeline's module; that of a block gets the layer 0."""
    if norm := _NORM.fullmatch(rest):
        return Name(f"ln_f.{norm[1]}", None, "megatron")
    if _HEAD.fullmatch(rest):
        return Name("lm_head.weight", None, "megatron")
    for prefix in ("", "layers.0.", "h.0."):
        try:
            return parse(prefix + rest)
        except KeyError:
            continue
    raise KeyError(rest)
