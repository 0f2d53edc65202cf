"""Write a source as Megatron-LM's `mp_rank_*` files, for its 2019 fork or for the GPTModel of today.

    latest_checkpointed_iteration.txt             the iteration, or `release`
    iter_0000100/mp_rank_TT/model_optim_rng.pt    one file per tensor rank (release/ without an iteration)
    iter_0000100/mp_rank_TT_PPP/…                 and per pipeline stage, if there are several

| | 2019 | v3 |
|---|---|---|
| a file | iteration, model | args, checkpoint_version 3.0, iteration, model |
| layer N | transformer.layers.N, of the model | decoder.layers.N, of the stage |
| qkv rows in a file | [(q, k, v), head, dim] | [head, (q, k, v), dim] |
| read by | the 2019 fork and its forks | Megatron-LM with `--ckpt-format torch --transformer-impl local` |

There is no optimizer and no random state: `--finetune`, or `--no-load-optim --no-load-rng`. Memory is that of
`assemble`: each tensor is written to the files of all its ranks before the next one is read.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from common.errors import CheckpointError
from common.files import naming, write_text
from convert.assemble import assemble
from convert.megatron_args import TANH_GELU, args_of, check_split, padded_rows
from convert.pt import load_pt
from convert.sources.source import QKV, Source
from convert.stored import StoredTensor
from training.tensors import LAYER_LEAVES, ROOT_LEAVES, Leaf, Module, leaf_of

_POINTER = "latest_checkpointed_iteration.txt"
_FILE = "model_optim_rng.pt"


class _Format(NamedTuple):
    """A version's names, and its order of qkv rows."""

    version: int
    embeddings: str
    stack: str
    of: Callable[[Module], str]


_2019 = _Format(0, "", "transformer.", lambda module: module.fork_2019)
_V3 = _Format(3, "embedding.", "decoder.", lambda module: module.core)


def write_2019(source: Source, folder: Path, *, tp: int, pp: int) -> None:
    """Write the run of a source to `folder`, which is empty, as the 2019 fork does.

    Raises CheckpointError if that fork has no such model or layout; OSError naming the file if the disk is full.
    """
    model = source.model
    if pp > 1:
        raise CheckpointError("--pp: the 2019 format has no pipeline stages; leave it out")
    for what, differs in (
        ("a head of its own", not model.tied),
        (f"the activation {model.activation}", model.activation not in TANH_GELU),
        (f"the LayerNorm epsilon {model.layer_norm_epsilon}", model.layer_norm_epsilon != 1e-5),
        (f"MLPs {model.n_inner} wide", model.n_inner != 4 * model.n_embd),
    ):
        if differs:
            raise CheckpointError(f"{source.path}: has {what}, which the 2019 fork does not; choose --format v3")
    _write(source, folder, _2019, tp, pp, {})


def write_v3(source: Source, folder: Path, *, tp: int, pp: int) -> None:
    """Write the run of a source to `folder`, which is empty, as Megatron-LM does since 2023.

    Raises CheckpointError if the ranks do not divide the model; OSError naming the file if the disk is full.
    """
    args = Namespace(**args_of(source, tp, pp))
    _write(source, folder, _V3, tp, pp, {"args": args, "checkpoint_version": 3.0})


def _write(source: Source, folder: Path, form: _Format, tp: int, pp: int, common: Mapping[str, Any]) -> None:
    check_split(source, tp, pp)
    name = f"iter_{source.iteration:07d}" if source.iteration else "release"
    content = {**common, "iteration": source.iteration or 0}
    for stage in range(pp):
        suffix = f"_{stage:03d}" if pp > 1 else ""
        keys = dict(_keys(source, form, stage, pp))
        paths = [folder / name / f"mp_rank_{rank:02d}{suffix}" / _FILE for rank in range(tp)]
        files = [_reserve(path, content, {key: _empty(source, keys[key], tp) for key in keys}) for path in paths]
        for key, ours in keys.items():
            tensor = assemble(source, ours, qkv=QKV(form.version, tp))
            for rank, file in enumerate(files):
                _fill(file[key], tensor, leaf_of(ours).split, rank)
    write_text(folder / _POINTER, f"{source.iteration or 'release'}")


def _keys(source: Source, form: _Format, stage: int, stages: int) -> Iterator[tuple[str, str]]:
    """(their key, our name) of a stage's tensors."""
    count = source.model.n_layer // stages
    wte, wpe, *norm, head = ROOT_LEAVES.values()
    if stage == 0:
        for leaf in (wte, wpe):
            yield f"{form.embeddings}{_theirs(form, leaf)}", leaf.name
    for layer in range(count):
        for leaf in LAYER_LEAVES.values():
            yield f"{form.stack}layers.{layer}.{_theirs(form, leaf)}", f"h.{stage * count + layer}.{leaf.name}"
    if stage == stages - 1:
        for leaf in norm:
            yield f"{form.stack}{_theirs(form, leaf)}", leaf.name
        if not source.model.tied:
            yield _theirs(form, head), head.name
        elif stages > 1:  # the last stage has no embedding that the head could use
            yield _theirs(form, head), wte.name


def _theirs(form: _Format, leaf: Leaf) -> str:
    return f"{form.of(leaf.module)}.{leaf.kind}"


def _empty(source: Source, name: str, tp: int) -> Tensor:
    """A rank's part of a tensor, of the right shape and type, without memory."""
    leaf = leaf_of(name)
    shape = list(leaf.shape(source.model.sizes._replace(vocabulary=padded_rows(source, tp))))
    if leaf.split is not None:
        shape[leaf.split] //= tp
    with FakeTensorMode():
        return torch.empty(shape, dtype=source.tensors[name].blocks[0].tensor.dtype)


def _reserve(path: Path, content: Mapping[str, Any], model: Mapping[str, Tensor]) -> Mapping[str, StoredTensor]:
    """Save a file whose tensors are zeros that use no disk space; returns where their data lies."""
    path.parent.mkdir(parents=True)
    with naming(path), path.open("xb") as file, torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({**content, "model": dict(model)}, file)
    found: Mapping[str, StoredTensor] = load_pt(path)["model"]
    return found


def _fill(stored: StoredTensor, tensor: Tensor, dim: int | None, rank: int) -> None:
    """Write a rank's part of a tensor where `stored` lies.

    Rows of the embedding's padding repeat its last one, as in Megatron-LM's own converter: with zeros, these tokens
    would have a logit of 0, which is more than those of most tokens of a trained GPT-2.
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
