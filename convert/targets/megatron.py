"""Write a source as Megatron-LM's `mp_rank_*` files, for the GPTModel of today.

    latest_checkpointed_iteration.txt             the iteration, or `release`
    iter_0000100/mp_rank_TT/model_optim_rng.pt    per tensor rank (release/ without an iteration)
    iter_0000100/mp_rank_TT_PPP/…                 and per pipeline stage, if there are several

A file holds args, checkpoint_version 3.0, iteration and model; each stage counts its layers from 0.
Megatron-LM reads it with `--ckpt-format torch --transformer-impl local`. There is no optimizer and
no random state: `--finetune`, or `--no-load-optim --no-load-rng`. Memory is that of `assemble`:
each tensor is written to the files of all its ranks before the next one is read.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from common.files import naming, write_text
from convert.assemble import assemble
from convert.megatron_args import args_of, check_split
from convert.pt import load_pt
from convert.sources.source import Architecture, Source
from training.checkpoint.files import StoredTensor
from training.parallel.sizes import padded_vocab_size
from training.tensors import HEAD, LAYER_LEAVES, ROOT_LEAVES, Leaf, leaf_of

_FILE = "model_optim_rng.pt"
_PREFIXES = {"wte": "embedding.", "wpe": "embedding.", "ln_f": "decoder.", "lm_head": ""}


def write_v3(source: Source, folder: Path, *, tp: int, pp: int) -> None:
    """Write a run into the empty `folder`, as Megatron-LM does since 2023; see `begin_run`."""
    args = {**args_of(source, tp, pp), "world_size": tp * pp}
    content = {"checkpoint_version": 3.0, "iteration": source.iteration or 0}
    target = begin_run(source, folder, tp, pp)
    for stage in range(pp):
        suffix = f"_{stage:03d}" if pp > 1 else ""
        keys = dict(_keys(source.model, stage, pp))
        paths = [target / f"mp_rank_{rank:02d}{suffix}" / _FILE for rank in range(tp)]
        files = [
            _reserve(
                path,
                {"args": Namespace(**args, rank=stage * tp + rank), **content},
                {key: _empty(source, keys[key], tp) for key in keys},
            )
            for rank, path in enumerate(paths)
        ]
        for key, ours in keys.items():
            tensor = assemble(source, ours)
            for rank, file in enumerate(files):
                _fill(file[key], tensor, leaf_of(ours).split, rank)


def begin_run(source: Source, folder: Path, tp: int, pp: int) -> Path:
    """Write the run's pointer; returns the folder for its iteration, which is not made yet.

    Raises CheckpointError if the ranks do not divide the model.
    """
    check_split(source, tp, pp)
    write_text(folder / "latest_checkpointed_iteration.txt", f"{source.iteration or 'release'}")
    return folder / (f"iter_{source.iteration:07d}" if source.iteration else "release")


def key_of(leaf: Leaf, layer: str = "", *, folded: bool = False) -> str:
    """Megatron-core's key; `layer`: `3.`, or empty in stacked names; `folded`: in linear layers."""
    prefix = _PREFIXES.get(leaf.module.name, f"decoder.layers.{layer}")
    stem = leaf.module.folded if folded else ""
    return f"{prefix}{stem or f'{leaf.module.core}.'}{leaf.kind}"


def _keys(model: Architecture, stage: int, stages: int) -> Iterator[tuple[str, str]]:
    """(their key, our name) of a stage's tensors."""
    count = model.n_layer // stages
    wte, wpe, *norm, head = ROOT_LEAVES.values()
    if stage == 0:
        for leaf in (wte, wpe):
            yield key_of(leaf), leaf.name
    for layer in range(count):
        for leaf in LAYER_LEAVES.values():
            yield key_of(leaf, f"{layer}."), f"h.{stage * count + layer}.{leaf.name}"
    if stage == stages - 1:
        for leaf in norm:
            yield key_of(leaf), leaf.name
        if stages > 1 or not model.tied:  # the last stage has no embedding that a tied head could use
            yield key_of(head), wte.name if model.tied else HEAD


def _empty(source: Source, name: str, tp: int) -> Tensor:
    """A rank's part of a tensor, of the right shape and type, without memory."""
    leaf = leaf_of(name)
    rows = padded_vocab_size(source.model.vocab_size, tp)
    shape = list(leaf.shape(source.model.sizes._replace(vocabulary=rows)))
    if leaf.split is not None:
        shape[leaf.split] //= tp
    with FakeTensorMode():
        return torch.empty(shape, dtype=source.tensors[name].dtype)


def _reserve(path: Path, content: Mapping[str, Any], model: Mapping[str, Tensor]) -> Mapping[str, StoredTensor]:
    """Save a file of zeros that use no disk space; returns where the tensors' data is."""
    path.parent.mkdir(parents=True)
    with naming(path), path.open("xb") as file, torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({**content, "model": dict(model)}, file)
    places: Mapping[str, StoredTensor] = load_pt(path)["model"]
    return places


def _fill(stored: StoredTensor, tensor: Tensor, dim: int | None, rank: int) -> None:
    """Write a rank's part of a tensor where `stored` lies.

    Padding rows of the embedding repeat its last row, as in Megatron-LM's own converter: zeros
    would give these tokens a logit of 0, above that of most tokens of a trained GPT-2.
    """
    part = tensor
    if dim is not None:
        size, whole = stored.shape[dim], tensor.shape[dim]
        start = min(rank * size, whole)
        part = tensor.narrow(dim, start, min(size, whole - start))
        if part.shape[dim] < size:
            part = torch.cat([part, tensor[-1:].expand(size - part.shape[dim], -1)])
    with naming(stored.path), stored.path.open("r+b") as file:
        file.seek(stored.offset)
        file.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
