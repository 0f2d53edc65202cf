"""Megatron-core's `torch_dist` checkpoints, its default since 2024.

    .metadata, __RANK_N.distcp   tensors of the whole model (torch.distributed.checkpoint)
    metadata.json                {"sharded_backend": "torch_dist", …}
    common.pt                    args, iteration, step; since core 0.19 an object of .metadata

Keys are those of the model, bare or under `model.` or `module.`. Layers are stacked along a leading
dimension, or numbered. Masters and moments lie under `optimizer.state.`, unless the optimizer was
saved in flat buffers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, InputError
from common.files import read_json
from convert.arguments import Options
from convert.megatron_args import json_args, number, read_args
from convert.pt import fields, load_pt, number_in
from convert.sources.consistency import iteration_of
from convert.sources.dcp import Dcp
from convert.sources.names import Name, parse
from convert.sources.ranks import architecture, qkv_order
from convert.sources.source import Sharded, Source
from training.moments import ADAMW, NAMES

_COMMON = "common_state/"
_PARTS = ("args", "iteration", "checkpoint_version")  # objects of their own in torch_dcp folders
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.([^.]+)\.)?(.+)")
_MASTERS = ("fp32_param", "param")
_Keys = Mapping[str, Name]
"""Keys of one kind (weights, a moment), and what they name."""


def matches(folder: Path) -> bool:
    """Whether the folder holds a distributed checkpoint."""
    return (folder / ".metadata").is_file() or "sharded_backend" in _backend(folder)


def open_folder(folder: Path, options: Options) -> Source:
    """The checkpoint in `folder`; reads `.metadata`, `common.pt` and the head of each record."""
    backend = _backend(folder).get("sharded_backend", "torch_dist")
    if backend != "torch_dist":
        raise CheckpointError(
            f"{folder}/metadata.json: saved by the backend {backend!r}; only torch_dist is read: load it with the "
            "Megatron-LM that wrote it, and save it with --ckpt-format torch_dist"
        )
    dcp = Dcp(folder)
    common = _read_common(dcp)
    iteration = iteration_of(folder, number_in(common.get("iteration")))
    args = fields(common.get("args"))
    recorded = read_args(args, options)
    kinds, notes = _sort_keys(dcp)
    weights = _load(dcp, kinds[""])
    # masters and moments may be flat; their places in the model tell the shapes
    shapes = {(name.leaf, name.layer): dcp.shapes[key] for key, name in kinds[""].items()}
    masters = _load(dcp, {key: name for kind in _MASTERS for key, name in kinds[kind].items()}, shapes)
    moments = {kind: _load(dcp, kinds[kind], shapes) for kind in ADAMW}
    used = {name: kept for name, kept in masters.items() if name in weights and kept.shape == weights[name].shape}
    tensors = weights | used
    if used:
        notes.append(f"weights are the optimizer's float32 masters ({len(used)} of {len(tensors)} tensors)")
    model, assumed = architecture(tensors, recorded)
    step = _step(common)
    if any(moments.values()) and step is None:
        step = iteration
        notes.append(f"the optimizer's step is not recorded: {iteration}, the iteration, is used")
    tensor, pipeline = (number(args, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline"))
    ranks = f", written by tensor {tensor} x pipeline {pipeline}" if pipeline else ""
    stacked = " (stacked)" if any(name.stacked for name in kinds[""].values()) else ""
    small = {path for name in ("metadata.json", "common.pt") if (path := folder / name).exists()}
    return Source(
        path=folder,
        layout=f"Megatron-core torch_dist, {model.n_layer} layers{stacked}{ranks}",
        model=model,
        qkv=qkv_order(3, options, 1, what="the version of torch_dist"),
        tensors=tensors,
        files=tuple(sorted(dcp.files | small)),
        iteration=iteration,
        consumed_samples=recorded.consumed_samples,
        notes=(*assumed, *notes),
        moments=moments,
        step=step,
        facts={
            "checkpoint_version": number_in(common.get("checkpoint_version")),
            "args": json_args(args),
        },
    )


def _backend(folder: Path) -> Mapping[str, Any]:
    """The content of metadata.json; empty if there is none."""
    if not (folder / "metadata.json").is_file():
        return {}
    try:
        return fields(read_json(folder / "metadata.json"))
    except InputError as error:
        raise CheckpointError(str(error)) from None


def _read_common(dcp: Dcp) -> Mapping[str, Any]:
    """The content without tensors: args, iteration, the optimizer's step."""
    path = dcp.folder / "common.pt"
    if path.exists():
        return fields(load_pt(path))
    keys = [key for key in dcp.objects if key.startswith(_COMMON)]
    if keys:
        content = dcp.load_object(keys[0])  # a list of one shard's content
        return fields(content[0] if isinstance(content, list) and content else content)
    return {key: dcp.load_object(key) for key in _PARTS if key in dcp.objects}


def _sort_keys(dcp: Dcp) -> tuple[dict[str, dict[str, Name]], list[str]]:
    """The keys of weights (""), moments and masters, and notes about what is left out."""
    kinds: dict[str, dict[str, Name]] = {kind: {} for kind in ("", *ADAMW, *_MASTERS)}
    flat, left = any("optimizer.distributed." in key for key in dcp.objects), set[str]()
    for key in dcp.shapes:
        kind, bare = "", key
        if match := _OPTIMIZER.fullmatch(key):
            state, bare = match.groups()
            if state is None:
                flat = True
                continue
            kind = NAMES.get(state, state)
            if kind not in kinds:
                left.add(kind)
                continue
        if bare.startswith(("rng_state", "opt_param_scheduler")):
            continue
        try:
            name = parse(bare)
        except KeyError:
            raise CheckpointError(f"{dcp.folder}/.metadata: unknown tensor {key!r}: no GPT-2 has it") from None
        if name is not None:
            kinds[kind][key] = name
    notes = ["optimizer state that is not stored per parameter (flat buffers) is left out"] if flat else []
    notes += [f"optimizer state {kind!r} is left out: neither AdamW nor Muon has it" for kind in sorted(left)]
    return kinds, notes


def _load(
    dcp: Dcp, keys: _Keys, shapes: Mapping[tuple[str, int | None], tuple[int, ...]] | None = None
) -> dict[str, Sharded]:
    """The tensors of keys by our names, stacked ones split; `shapes` are the weights' shapes."""
    tensors: dict[str, Sharded] = {}
    for key, name in keys.items():
        tensor = dcp.sharded(key, (shapes or {}).get((name.leaf, name.layer)))
        named = {name.ours(): tensor}
        if name.stacked:
            named = {f"h.{layer}.{name.leaf}": part for layer, part in enumerate(tensor.layers())}
        if twice := named.keys() & tensors.keys():
            raise CheckpointError(f"tensor {key!r} is there twice, under another key as well: {min(twice)}")
        tensors |= named
    return tensors


def _step(common: Mapping[str, Any]) -> int | None:
    """The optimizer's steps: the first count in it, or in its chained optimizers."""
    outer = fields(common.get("optimizer"))
    counts: list[Any] = []
    for chained in [outer, *(fields(each) for key, each in outer.items() if isinstance(key, int))]:
        inner = fields(chained.get("optimizer")) or chained
        groups = inner.get("param_groups")
        counts.append(fields(inner.get("state")).get("common_step"))
        counts += [fields(group).get("step") for group in groups] if isinstance(groups, list) else []
    return number_in(*counts)
