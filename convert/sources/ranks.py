"""Join the tensors of tensor ranks and pipeline stages, and derive the model's sizes from them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.errors import CheckpointError
from convert.arguments import Options
from convert.sources.consistency import check_distinct
from convert.sources.source import QKV, Architecture, Recorded, Sharded, same_values
from training import tensors as table
from training.tensors import HEAD, Sizes, all_names, layer_of, leaf_of

GPT2_VOCABULARY = 50257
VOCABULARY_STEP = 128
"""Megatron's make_vocab_size_divisible_by: rows of the embedding per tensor rank."""
_HEAD_SIZE = 64  # of every GPT-2 that OpenAI published, and of Megatron's 2019 recipes
_MAX_RANKS = 128


def join_ranks(ranks: Sequence[Mapping[str, Sharded]], conv1d: bool = False) -> dict[str, Sharded]:
    """A stage's tensors from those of its tensor ranks, in order. Raises CheckpointError."""
    names = ranks[0].keys()
    for number, rank in enumerate(ranks):
        for name in sorted(names ^ rank.keys()):
            lacking = number if name in names else 0
            raise CheckpointError(
                f"tensor {name!r} is missing from tensor rank {lacking}; the ranks do not belong together"
            )
    joined: dict[str, Sharded] = {}
    for name in names:
        tensors = [rank[name] for rank in ranks]
        shape, dtype = tensors[0].shape, tensors[0].dtype
        for number, tensor in enumerate(tensors):
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                raise CheckpointError(
                    f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)} on tensor rank {number}, and {dtype} "
                    f"{list(shape)} on rank 0; the ranks do not belong together"
                )
        leaf = leaf_of(name)
        if leaf.split is None:
            copies = {f"tensor rank {number}": tensor for number, tensor in enumerate(tensors) if number}
            joined[name] = replace(tensors[0], copies=copies)
        else:
            dim = 1 - leaf.split if conv1d and leaf.conv1d else leaf.split
            along = [int(axis == dim) for axis in range(len(shape))]
            starts = [[number * shape[dim] * step for step in along] for number in range(len(ranks))]
            full = tuple(size * (len(ranks) if axis == dim else 1) for axis, size in enumerate(shape))
            blocks = [block for start, tensor in zip(starts, tensors, strict=True) for block in tensor.moved(start)]
            joined[name] = Sharded(full, tuple(blocks))
    return joined


def join_stages(stages: Sequence[tuple[str, Mapping[str, Sharded]]]) -> dict[str, Sharded]:
    """The model's tensors from those of its pipeline stages; a second `wte.weight` is a copy."""
    check_distinct(
        block.tensor
        for _, tensors in stages
        for matrix in [matrix for name, matrix in tensors.items() if name.endswith(f"{table.QKV}.weight")][:1]
        for block in matrix.blocks
    )
    joined: dict[str, Sharded] = {}
    for stage, tensors in stages:
        for name, tensor in tensors.items():
            if name not in joined:
                joined[name] = tensor
            elif name == "wte.weight":
                joined[name] = replace(joined[name], copies={**joined[name].copies, stage: tensor})
            else:
                raise CheckpointError(f"tensor {name!r} is in {stage} and in an earlier stage")
    return joined


def tie_head(tensors: dict[str, Sharded], tied: bool | None) -> tuple[dict[str, Sharded], tuple[str, ...]]:
    """The tensors with a tied head as a copy of `wte.weight`, and a note; `tied`: as recorded.

    In Megatron-core the last pipeline stage has the tied weight under the head's name.
    """
    head, wte = tensors.get(HEAD), tensors.get("wte.weight")
    if wte is None or head is None or tied is False:
        return tensors, ()
    if tied is None and not (head.dtype == wte.dtype and same_values(head, wte)):
        return tensors, ("the head differs from the token embedding: taken as not tied",)
    others = {name: tensor for name, tensor in tensors.items() if name != HEAD}
    return {**others, "wte.weight": replace(wte, copies={**wte.copies, "output_layer": head})}, ()


def qkv_order(
    recorded: Any, options: Options, shards: int, *, default: int | None = None, what: str = "checkpoint_version"
) -> QKV:
    """The order of the qkv rows; `what` names the recorded version. Raises CheckpointError."""
    given = options.qkv_version
    for name, version in ((what, recorded), ("--qkv-version", given)):
        if version is not None and version not in range(4):
            raise CheckpointError(f"{name} is {version!r}, which is unknown; 0 to 3 can be read")
    if None not in (recorded, given) and QKV(int(recorded)) != QKV(given):  # type: ignore[arg-type]
        raise CheckpointError(f"--qkv-version is {given}, but {what} is {recorded}; leave the flag out")
    version = next((int(version) for version in (recorded, given, default) if version is not None), None)
    if version is None:
        raise CheckpointError(
            f"has no {what}, so the order of its qkv rows is unknown; give --qkv-version (Megatron-LM itself reads "
            "such a file as 0)"
        )
    return QKV(version, shards)


def check_complete(tensors: Mapping[str, Sharded]) -> int:
    """The number of layers. Raises CheckpointError if a tensor is missing."""
    count = max((layer for name in tensors if (layer := layer_of(name)) is not None), default=-1) + 1
    missing = sorted(set(all_names(count)) - tensors.keys(), key=lambda name: (name.count("."), name))
    if missing or not count:
        what = f"tensor {missing[0]!r} is missing" if missing else "no layers"
        raise CheckpointError(f"{what}{f' (and {len(missing) - 1} more)' if len(missing) > 1 else ''}")
    return count


def architecture(
    tensors: Mapping[str, Sharded], recorded: Recorded, *, conv1d: bool = False, shards: int = 1
) -> tuple[Architecture, tuple[str, ...]]:
    """Sizes from shapes, constants from what is recorded, and notes about what was assumed.

    CheckpointError if the tensors are no complete GPT-2, or contradict what is recorded.
    """
    n_layer = check_complete(tensors)
    rows, n_embd = tensors["wte.weight"].shape
    n_inner = tensors["h.0.mlp.c_fc.bias"].shape[0]
    sizes = Sizes(n_embd, n_inner, tensors["wpe.weight"].shape[0], rows)
    for name, tensor in tensors.items():
        wanted = leaf_of(name).shape(sizes, conv1d)
        if tensor.shape != wanted:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(tensor.shape)}, a GPT-2 of width {n_embd} has {list(wanted)}"
            )
    n_head, notes = recorded.n_head, list(recorded.notes)
    if n_head is None:
        if n_embd % _HEAD_SIZE:
            raise CheckpointError(
                f"the number of heads is not recorded, and {n_embd} is no multiple of {_HEAD_SIZE}; give --num-heads"
            )
        n_head = n_embd // _HEAD_SIZE
        notes.insert(0, f"heads are not recorded: {n_head} of {_HEAD_SIZE} assumed (--num-heads decides)")
    if n_head < 1 or n_embd % n_head or n_head % shards:
        raise CheckpointError(
            f"{n_head} heads do not divide a width of {n_embd} over {shards} tensor ranks; give --num-heads"
        )
    true, note = true_vocabulary(rows, recorded.vocab_size)
    model = Architecture(
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        n_positions=sizes.positions,
        n_inner=n_inner,
        vocab_size=true,
        tied=HEAD not in tensors,
    )
    for field, (name, value) in recorded.sizes.items():
        if getattr(model, field) != value:
            raise CheckpointError(
                f"{name} is {value}, but the tensors have {getattr(model, field)}; files are missing or do not belong "
                "together"
            )
    return replace(model, **recorded.constants), (*notes, *note)


def true_vocabulary(rows: int, recorded: int | None) -> tuple[int, tuple[str, ...]]:
    """The number of `rows` that are tokens, and a note. CheckpointError if `recorded` is more."""
    if recorded is not None and recorded > rows:
        raise CheckpointError(
            f"--vocab-size, or vocab_size as recorded, is {recorded}, but the embedding has {rows} rows"
        )
    if recorded is not None and recorded > 0:
        return recorded, ()
    padding = rows - GPT2_VOCABULARY
    if 0 < padding < VOCABULARY_STEP * _MAX_RANKS and rows % VOCABULARY_STEP == 0:
        note = f"vocabulary taken as GPT-2's {GPT2_VOCABULARY}: {rows} rows are that many padded (--vocab-size decides)"
        return GPT2_VOCABULARY, (note,)
    return rows, ()
