"""From the tensors of tensor-parallel ranks and pipeline stages to whole tensors, and what their shapes say."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.errors import CheckpointError
from convert.files.stored import Stored
from convert.sources.agreement import check_distinct
from convert.sources.source import Architecture, Block, Sharded, whole

GPT2_VOCABULARY = 50257
_VOCABULARY_STEP = 128  # Megatron's make_vocab_size_divisible_by: rows are a multiple of this times the ranks
HEAD_SIZE = 64  # of every GPT-2 that OpenAI published, and of Megatron's 2019 recipes

# dimension of [out, in] that tensor parallelism splits; all others are copies on every rank
_SPLIT = {
    "wte.weight": 0,
    "lm_head.weight": 0,
    "attn.c_attn.weight": 0,
    "attn.c_attn.bias": 0,
    "attn.c_proj.weight": 1,
    "mlp.c_fc.weight": 0,
    "mlp.c_fc.bias": 0,
    "mlp.c_proj.weight": 1,
}
LINEAR = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
"""The matrices that Conv1D stores [in, out]."""
_LEAVES = {
    *(
        f"{name}.{kind}"
        for name in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        for kind in ("weight", "bias")
    )
}
_NUMBER = re.compile(r"h\.(\d+)\.(.+)")


def leaf_of(name: str) -> str:
    """`attn.c_attn.weight` of `h.3.attn.c_attn.weight`; other names as they are."""
    found = _NUMBER.fullmatch(name)
    return found[2] if found else name


def split_dim(name: str, conv1d: bool) -> int | None:
    """The dimension that tensor parallelism splits; None for a tensor that every rank has as a whole."""
    leaf = leaf_of(name)
    dim = _SPLIT.get(leaf)
    return 1 - dim if dim is not None and conv1d and leaf in LINEAR else dim


def join_ranks(ranks: Sequence[Mapping[str, Stored]], conv1d: bool = False) -> dict[str, Sharded]:
    """One pipeline stage's tensors from those of its tensor-parallel ranks, in order.

    Raises CheckpointError if a rank lacks a tensor or has it in another shape.
    """
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
        shape = tuple(tensors[0].shape)
        for number, tensor in enumerate(tensors):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"tensor {name!r} has shape {list(tensor.shape)} on tensor rank {number} and {list(shape)} on "
                    "rank 0; the ranks do not belong together"
                )
        dim = split_dim(name, conv1d)
        if dim is None:
            copies = {f"tensor rank {number}": whole(tensor) for number, tensor in enumerate(tensors) if number}
            joined[name] = Sharded(shape, whole(tensors[0]).blocks, copies)
        else:
            offsets = [
                tuple(number * size if axis == dim else 0 for axis, size in enumerate(shape))
                for number in range(len(ranks))
            ]
            full = tuple(size * len(ranks) if axis == dim else size for axis, size in enumerate(shape))
            joined[name] = Sharded(full, tuple(map(Block, offsets, tensors)))
    return joined


def join_stages(stages: Sequence[tuple[str, Mapping[str, Sharded]]]) -> dict[str, Sharded]:
    """The model's tensors from those of its (named) pipeline stages; a second `wte.weight` becomes a copy.

    Raises CheckpointError if a tensor is in two stages, or two stages have the same weights.
    """
    check_distinct(
        next(iter(matrices)).blocks[0].tensor
        for _, tensors in stages
        if (matrices := [tensor for name, tensor in tensors.items() if leaf_of(name) == LINEAR[0]])
    )
    joined: dict[str, Sharded] = {}
    for stage, tensors in stages:
        for name, tensor in tensors.items():
            if name not in joined:
                joined[name] = tensor
            elif name == "wte.weight":
                first = joined[name]
                joined[name] = Sharded(first.shape, first.blocks, {**first.copies, stage: tensor})
            else:
                raise CheckpointError(f"tensor {name!r} is in {stage} and in an earlier stage")
    return joined


def check_complete(tensors: Mapping[str, Sharded]) -> int:
    """The number of layers. Raises CheckpointError if a tensor is missing."""
    layers = {int(found[1]) for name in tensors if (found := _NUMBER.fullmatch(name))}
    count = max(layers, default=-1) + 1
    expected = {f"h.{layer}.{leaf}" for layer in range(count) for leaf in _LEAVES}
    expected |= {"wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"}
    missing = sorted(expected - tensors.keys(), key=lambda name: (name.count("."), name))
    if missing or not count:
        what = f"tensor {missing[0]!r} is missing" if missing else "no layers"
        raise CheckpointError(f"{what}{f' (and {len(missing) - 1} more)' if len(missing) > 1 else ''}")
    return count


def true_vocabulary(rows: int, shards: int, recorded: int | None) -> tuple[int, str]:
    """How many of `rows` are tokens, and a note; `recorded` is the source's own number, if it has one."""
    if recorded is not None and 0 < recorded <= rows:
        return recorded, ""
    step = _VOCABULARY_STEP * shards
    padded = -(-GPT2_VOCABULARY // step) * step
    if rows == padded or (
        rows > GPT2_VOCABULARY and rows % _VOCABULARY_STEP == 0 and rows - GPT2_VOCABULARY < 128 * 128
    ):
        return (
            GPT2_VOCABULARY,
            f"vocabulary taken as GPT-2's {GPT2_VOCABULARY}: {rows} rows are that many padded (--vocab-size decides)",
        )
    return rows, ""


def architecture(
    tensors: Mapping[str, Sharded],
    *,
    conv1d: bool = False,
    n_head: int | None = None,
    vocab_size: int | None = None,
    shards: int = 1,
) -> tuple[Architecture, tuple[str, ...]]:
    """Sizes from shapes, and notes about what was assumed; `n_head` and `vocab_size` are recorded or given numbers.

    Raises CheckpointError if the tensors are no complete GPT-2.
    """
    n_layer = check_complete(tensors)
    rows, n_embd = tensors["wte.weight"].shape
    n_inner = tensors["h.0.mlp.c_fc.bias"].shape[0]
    expected = {
        "ln_1.weight": (n_embd,),
        "ln_1.bias": (n_embd,),
        "ln_2.weight": (n_embd,),
        "ln_2.bias": (n_embd,),
        "attn.c_attn.weight": (3 * n_embd, n_embd),
        "attn.c_attn.bias": (3 * n_embd,),
        "attn.c_proj.weight": (n_embd, n_embd),
        "attn.c_proj.bias": (n_embd,),
        "mlp.c_fc.weight": (n_inner, n_embd),
        "mlp.c_fc.bias": (n_inner,),
        "mlp.c_proj.weight": (n_embd, n_inner),
        "mlp.c_proj.bias": (n_embd,),
        "wte.weight": (rows, n_embd),
        "wpe.weight": (tensors["wpe.weight"].shape[0], n_embd),
        "ln_f.weight": (n_embd,),
        "ln_f.bias": (n_embd,),
        "lm_head.weight": (rows, n_embd),
    }
    for name, tensor in tensors.items():
        leaf = leaf_of(name)
        wanted = expected[leaf][::-1] if conv1d and leaf in LINEAR else expected[leaf]
        if tensor.shape != wanted:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(tensor.shape)}, a GPT-2 of width {n_embd} has {list(wanted)}"
            )
    notes = []
    if n_head is None:
        if n_embd % HEAD_SIZE:
            raise CheckpointError(
                f"the number of heads is not recorded, and {n_embd} is no multiple of {HEAD_SIZE}; give --num-heads"
            )
        n_head = n_embd // HEAD_SIZE
        notes.append(f"heads are not recorded: {n_head} of {HEAD_SIZE} assumed (--num-heads decides)")
    if n_head < 1 or n_embd % n_head or n_head % shards:
        raise CheckpointError(
            f"{n_head} heads do not divide a width of {n_embd} over {shards} tensor ranks; give --num-heads"
        )
    true, note = true_vocabulary(rows, shards, vocab_size)
    notes += [note] if note else []
    model = Architecture(
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        n_positions=tensors["wpe.weight"].shape[0],
        n_inner=n_inner,
        vocab_size=true,
        tied="lm_head.weight" not in tensors,
    )
    return model, tuple(notes)


def file_error(path: Path, problem: object) -> CheckpointError:
    """One line that names the file."""
    return CheckpointError(f"{path}: {problem}")
