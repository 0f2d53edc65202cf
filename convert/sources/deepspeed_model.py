"""From DeepSpeed's tensors by their keys to a model: what keys mean, what is recorded about the model and beside it.

A pipeline numbers its modules: `3.input_layernorm.weight` is a tensor of layer_03-model_*; blocks are consecutive, and
the last norm (`8.weight`) comes after them. `tied_modules.embed.word_embeddings.weight` is in the first and last stage.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from convert.arguments import Options
from convert.megatron_args import read_args
from convert.pt import fields
from convert.sources.consistency import check_agreement
from convert.sources.huggingface import recorded_in
from convert.sources.names import Name, parse
from convert.sources.ranks import architecture, join_ranks, join_stages, qkv_order, tie_head
from convert.sources.source import MOMENTS, Recorded, Sharded, Source
from convert.sources.zero import number_in
from convert.stored import Stored
from training.huggingface.config import CONFIG, read_raw_config
from training.huggingface.tokenizer import read_tokenizer
from training.tensors import HEAD, leaf_of

State = Mapping[str, Any]
"""The content of a model file."""
Stages = Sequence[tuple[str, Sequence[Mapping[str, Stored]]]]
"""Stages of a pipeline (or its modules): a name, and the tensors of each tensor rank by key."""
_MODULE = re.compile(r"(?:module\.)?(\d+)\.(.+)")
_NORM = re.compile(r"(?:norm\.|final_layernorm\.|ln_f\.)?(weight|bias)")
_HEAD = re.compile(r"(?:lm_head|final_linear|output_layer)\.weight")  # final_linear: GPT-NeoX
_2019 = re.compile(r"(?:module\.)*transformer\.layers\.\d+\.attention\.query_key_value\.weight")


def build(
    folder: Path,
    options: Options,
    state: State,
    modules: Stages,
    trained: Mapping[str, Stages],
    *,
    layout: str,
    shards: int,
    files: Sequence[Path],
    version: Any,
    step: int | None,
    notes: Sequence[str],
    facts: Mapping[str, Any],
    cure: str,
) -> Source:
    """The source of 16-bit weights (`modules`), and of float32 weights ("") and moments by kind (`trained`).

    `shards` are the tensor ranks that decide the order of the qkv rows, `cure` is for weights that do not agree.
    """
    ranks = fields(fields(state.get("ds_config")).get("tensor_parallel")).get("autotp_size")
    if isinstance(ranks, int) and ranks > 1:
        raise CheckpointError(
            f"split over {ranks} ranks by DeepSpeed's AutoTP, whose order of rows is not recorded; "
            "save it with engine.save_16bit_model, which joins the ranks"
        )
    names = translate((*modules, *trained.get("", ())), second_names(state))
    families = {name.family for name in names.values() if name.layer is not None}
    if len(families) > 1:
        raise CheckpointError("names of Megatron beside names of transformers; remove the files of the other model")
    megatron = "transformers" not in families
    conv1d = not megatron and _is_conv1d(names, (*trained.get("", ()), *modules))
    recorded, tokenizer = _read_recorded(folder, state, options, megatron)
    tensors, note = tie_head(_join(modules, names, conv1d), recorded.tied)
    masters, *moments = (_join(trained.get(kind, ()), names, conv1d) for kind in ("", *MOMENTS))
    model, more_notes = architecture({**tensors, **masters}, recorded, conv1d=conv1d, shards=shards)
    check_agreement(tensors, masters, cure)
    tensors |= masters
    complete = all(found.keys() == tensors.keys() for found in moments)
    if masters and (frozen := len(tensors) - len(masters)):
        more_notes += (
            f"{frozen} tensors were not trained and have no float32 weights; those of the model files are taken",
        )
    elif any(moments) and not complete:
        more_notes += ("some weights have no moments of Adam: all are left",)
    iteration, samples = _progress(folder, state)
    types = sorted({str(tensor.blocks[0].tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    kept = "2019" if any(_2019.fullmatch(key) for key in names) else None
    args = fields(state.get("args"))
    said = 0 if not megatron else number_in(state.get("checkpoint_version", args.get("checkpoint_version")))
    return Source(
        path=folder,
        layout=f"DeepSpeed {version or 'of unknown version'}, {layout}, names of "
        f"{'Megatron' if megatron else 'transformers'}, {' and '.join(types)} {'masters' if masters else 'weights'}",
        model=model,
        qkv=qkv_order(said, options, shards, default=0 if kept else None),
        tensors=tensors,
        files=tuple(files),
        conv1d=conv1d,
        iteration=iteration,
        consumed_samples=samples,
        notes=(*notes, *more_notes, *note),
        moments=dict(zip(MOMENTS, moments, strict=True)) if complete else {},
        step=step if complete else None,
        tokenizer=tokenizer,
        facts={"deepspeed": version, **facts},
    )


def second_names(state: State) -> dict[str, str]:
    """The keys that are a second name of a tied embedding or head, with the first one."""
    shared = state.get("shared_params")  # none below ZeRO 1
    pairs: Iterable[Any] = shared.items() if isinstance(shared, Mapping) else shared or ()
    found = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    return {
        key: first for key, first in found.items() if (name := parse_key(key)) and name.leaf in ("wte.weight", HEAD)
    }


def parse_key(key: str) -> Name | None:
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


def translate(stages: Stages, second: Mapping[str, str]) -> dict[str, Name]:
    """What the keys mean; the number of a pipeline's module becomes that of the layer."""
    found: dict[str, Name] = {}
    for key in dict.fromkeys(key for _, ranks in stages for rank in ranks for key in rank):
        name = parse_key(key)
        if name is None or key in second:
            continue
        if name.leaf == HEAD and key in second.values():
            name = name._replace(leaf="wte.weight")  # the head came first, and the embedding is its second name
        found[key] = name
    blocks = {
        key: number for key, name in found.items() if name.layer is not None and (number := module_of(key)) is not None
    }
    first = min(blocks.values(), default=0)
    return found | {key: found[key]._replace(layer=number - first) for key, number in blocks.items()}


def _is_conv1d(names: Mapping[str, Name], stages: Stages) -> bool:
    """Whether the matrices are [in, out]: their output has the length of the bias."""
    for _, ranks in stages:
        tensors = {names[key].ours(): tensor for key, tensor in ranks[0].items() if key in names}
        for name, weight in tensors.items():
            bias = tensors.get(name.removesuffix("weight") + "bias")
            leaf = leaf_of(name)
            if leaf.conv1d and leaf.split == 0 and bias and weight.shape[0] != weight.shape[-1]:
                return weight.shape[-1] == bias.shape[0]
    return True


def _join(stages: Stages, names: Mapping[str, Name], conv1d: bool) -> dict[str, Sharded]:
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


def _read_recorded(folder: Path, state: State, options: Options, megatron: bool) -> tuple[Recorded, Any]:
    """The settings beside the weights, and the tokenizer of transformers' Trainer, which writes a config.json."""
    if megatron:
        recorded = read_args(fields(state.get("args")), options)
        tokens = number_in(fields(state.get("universal_checkpoint_info")).get("original_vocab_size"))
        return replace(recorded, vocab_size=recorded.vocab_size or tokens), None
    for place in (folder, folder.resolve().parent):
        if (place / CONFIG).is_file():
            return recorded_in(read_raw_config(place), options), read_tokenizer(place)
    return read_args({}, options), None


def _progress(folder: Path, state: State) -> tuple[int | None, int | None]:
    """Iterations, and consumed samples."""
    found = re.search(r"(\d+)(?:_universal)?$", folder.name)
    places = (state.get("iteration"), state.get("global_steps"), int(found[1]) if found else None)
    iteration = next((number for place in places if (number := number_in(place)) is not None), None)
    samples = [place.get("consumed_train_samples") for place in (state, fields(state.get("args")))]
    samples.append(state.get("global_samples"))  # steps x global batch size
    return iteration, next((number for place in samples if (number := number_in(place)) is not None), None)
