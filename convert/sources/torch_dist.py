"""Megatron-core's `torch_dist` checkpoints, its default since 2024.

iter_0000100/  .metadata, __RANK_N.distcp   tensors of the whole model (torch.distributed.checkpoint)
               metadata.json                {"sharded_backend": "torch_dist", …}
               common.pt                    args, iteration, step; from core 0.19 an object among the tensors

Keys are those of the model, bare or under `model.` or `module.`. Layers are stacked along a leading dimension, or
numbered. Masters and moments lie under `optimizer.state.`, unless the optimizer was saved in flat buffers.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from common.errors import CheckpointError
from convert.files.inert import fields, load_inert
from convert.files.stored import Stored
from convert.sources.dcp import Dcp, open_dcp
from convert.sources.megatron_args import json_args, read_args
from convert.sources.names import parse
from convert.sources.options import Options
from convert.sources.ranks import architecture
from convert.sources.source import MOMENTS, QKV, Sharded, Source

_COMMON = "common_state/"
_PARTS = ("args", "iteration", "checkpoint_version")  # objects of their own in torch_dcp folders
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.(exp_avg|exp_avg_sq|fp32_param|param)\.)?(.+)")
_MASTERS = ("fp32_param", "param")
_FOLDER = re.compile(r"iter_(\d+)")
_Shapes = Mapping[tuple[str, int | None], tuple[int, ...]]


def matches(folder: Path) -> bool:
    """Whether the folder holds a distributed checkpoint."""
    return (folder / ".metadata").is_file() or "sharded_backend" in _backend(folder)


def open_folder(folder: Path, options: Options) -> Source:
    """The checkpoint in `folder`; reads `.metadata`, `common.pt` and the head of each record.

    Raises CheckpointError in one line if files are missing or damaged, or if the model is no GPT-2.
    """
    backend = _backend(folder).get("sharded_backend", "torch_dist")
    if backend != "torch_dist":
        raise CheckpointError(
            f"{folder}: saved by the backend {backend!r}; only torch_dist is read: load it with the Megatron-LM that "
            "wrote it, and save it with --ckpt-format torch_dist"
        )
    dcp = open_dcp(folder)
    try:
        return _source(dcp, options)
    except CheckpointError as error:
        if str(error).startswith(str(folder)):
            raise
        raise CheckpointError(f"{folder}: {error}") from None


def _source(dcp: Dcp, options: Options) -> Source:
    common = _read_common(dcp)
    arguments = fields(common.get("args"))
    iteration = _iteration(dcp.folder, common)
    args = read_args(arguments, options)
    state, notes = _sort_keys(dcp)
    weights = _load(dcp, state[""])
    shapes = {_place(bare): dcp[key].shape for key, bare in state[""].items()}
    masters = _load(dcp, {key: name for kind in _MASTERS for key, name in state[kind].items()}, shapes)
    tensors = {name: _master(weights[name], masters.get(name)) for name in weights}
    model, assumed = architecture(tensors, n_head=args.n_head, vocab_size=args.vocab_size)
    if options.vocab_size is not None and options.vocab_size != model.vocab_size:
        rows = tensors["wte.weight"].shape[0]
        raise CheckpointError(f"--vocab-size is {options.vocab_size}, but the embedding has {rows} rows")
    used = sum(tensors[name] is not weights[name] for name in weights)
    if masters and not used and tensors["wte.weight"].blocks[0].tensor.dtype != torch.float32:
        notes.append("the optimizer's float32 masters are left: they have other shapes than the weights")
    elif used:
        notes.append(f"weights are the optimizer's float32 masters ({used} of {len(tensors)} tensors)")
    moments, left = _moments(dcp, state, tensors, shapes)
    step = _step(common) if moments else None
    if moments and step is None and iteration is not None:
        step, left = iteration, [f"the optimizer's step is not recorded: {iteration}, the iteration, is taken"]
    written = f", written by tensor {args.tensor} x pipeline {args.pipeline}" if args.tensor and args.pipeline else ""
    stacked = any((name := parse(key)) and name.stacked for key in state[""])
    return Source(
        path=dcp.folder,
        layout=f"Megatron-core torch_dist, {model.n_layer} layers{' (stacked)' if stacked else ''}{written}",
        model=args.apply(model),
        qkv=QKV(3),
        tensors=tensors,
        files=tuple(sorted(dcp.files() | _small_files(dcp.folder))),
        iteration=iteration,
        consumed_samples=args.consumed_samples,
        notes=(*assumed, *args.notes, *notes, *left),
        moments=moments,
        step=step,
        facts={"checkpoint_version": _plain(common.get("checkpoint_version")), "args": json_args(arguments)},
    )


def _backend(folder: Path) -> Mapping[str, Any]:
    """The content of metadata.json; empty if there is none."""
    path = folder / "metadata.json"
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise CheckpointError(f"{path}: no JSON; copy it from the original checkpoint") from None
    return content if isinstance(content, dict) else {}


def _small_files(folder: Path) -> set[Path]:
    return {path for name in ("metadata.json", "common.pt") if (path := folder / name).exists()}


def _read_common(dcp: Dcp) -> Mapping[str, Any]:
    """What is no tensor: args, iteration, the optimizer's step. Empty if the folder has none."""
    path = dcp.folder / "common.pt"
    if path.exists():
        return fields(load_inert(path))
    keys = [key for key in dcp.objects if key.startswith(_COMMON)]
    if keys:
        content = dcp.load_object(keys[0])  # a list of one shard's content
        return fields(content[0] if isinstance(content, list) and content else content)
    return {key: dcp.load_object(key) for key in _PARTS if key in dcp.objects}


def _iteration(folder: Path, common: Mapping[str, Any]) -> int | None:
    recorded = _plain(common.get("iteration"))
    found = _FOLDER.fullmatch(folder.name)
    if found and isinstance(recorded, int) and int(found[1]) != recorded:
        raise CheckpointError(
            f"the folder is of iteration {int(found[1])}, its common part of iteration {recorded}: files of two "
            f"checkpoints; restore them, or rename the folder to iter_{recorded:07d}"
        )
    return recorded if isinstance(recorded, int) else int(found[1]) if found else None


def _sort_keys(dcp: Dcp) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The keys of weights (""), moments and masters with their names without number, and notes about what is left."""
    state: dict[str, dict[str, str]] = {kind: {} for kind in ("", *MOMENTS, *_MASTERS)}
    flat = any("optimizer.distributed." in key for key in dcp.objects)
    for key in dcp:
        kind, bare = "", key
        if found := _OPTIMIZER.fullmatch(key):
            if found[1] is None:
                flat = True
                continue
            kind, bare = found.groups()
        if bare.startswith(("rng_state", "opt_param_scheduler")):
            continue
        try:
            name = parse(bare)
        except KeyError:
            raise CheckpointError(f"unknown tensor {key!r} of shape {list(dcp[key].shape)}: no GPT-2 has it") from None
        if name is not None:
            state[kind][key] = bare
    notes = ["optimizer state that is not stored per parameter (flat buffers) is left"] if flat else []
    return state, notes


def _place(bare: str) -> tuple[str, int | None]:
    """The leaf and the number that a key names, whatever its prefixes."""
    name = parse(bare)
    assert name is not None
    return name.leaf, name.layer


def _load(dcp: Dcp, keys: Mapping[str, str], shapes: _Shapes | None = None) -> dict[str, Sharded]:
    """The tensors of keys by our names, stacked ones as one per layer; `shapes` are those of the weights."""
    tensors: dict[str, Sharded] = {}
    for key, bare in keys.items():
        name = parse(bare)
        assert name is not None
        shape = (shapes or {}).get(_place(bare))
        if name.stacked:
            found = {f"h.{layer}.{name.leaf}": tensor for layer, tensor in enumerate(dcp.layers(key, shape))}
        else:
            found = {name.ours(): dcp.sharded(key, shape)}
        for ours, tensor in found.items():
            if ours in tensors:
                raise CheckpointError(f"tensor {key!r} is there twice, under another key as well")
            tensors[ours] = tensor
    return tensors


def _master(weight: Sharded, master: Sharded | None) -> Sharded:
    """The master if there is one and it is more exact."""
    if master is None or master.shape != weight.shape or weight.blocks[0].tensor.dtype == torch.float32:
        return weight
    return master


def _moments(
    dcp: Dcp, state: Mapping[str, Mapping[str, str]], tensors: Mapping[str, Sharded], shapes: _Shapes
) -> tuple[dict[str, dict[str, Sharded]], list[str]]:
    """Both moments of all tensors, or none and a note."""
    if not state["exp_avg"] and not state["exp_avg_sq"]:
        return {}, []
    moments = {kind: _load(dcp, state[kind], shapes) for kind in MOMENTS}
    for kind, found in moments.items():
        for name, tensor in tensors.items():
            if name not in found or found[name].shape != tensor.shape:
                return {}, [f"the optimizer's moments are left: {kind} of {name} is missing or has another shape"]
    return moments, []


def _step(common: Mapping[str, Any]) -> int | None:
    """The optimizer's steps, where its kinds keep them."""
    outer = fields(common.get("optimizer"))
    inner = fields(outer.get("optimizer")) or outer
    groups = inner.get("param_groups")
    found = [fields(inner.get("state")).get("common_step")]
    found += [fields(group).get("step") for group in groups] if isinstance(groups, list) else []
    return next((int(step) for value in found if isinstance(step := _plain(value), int | float)), None)


def _plain(value: Any) -> Any:
    """A number that may be stored as a tensor."""
    read: Callable[[], torch.Tensor] | None = getattr(value, "read", None)
    if read is None:
        return value
    stored: Stored = value
    return stored.read().item() if torch.Size(stored.shape).numel() == 1 else None
