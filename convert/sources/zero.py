"""Where ZeRO's flat partitions hold each parameter. Source: deepspeed/utils/zero_to_fp32.py.

    stages 1, 2    each group of parameters: [p0 p1 p2 … alignment], an equal part per data rank
    stage 3        each data rank: [its share of p0, of p1, …], ceil(size / ranks) elements each

A *_optim_states.pt holds a data rank's partition of the float32 weights and of Adam's moments.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from convert.pt import enum_member, fields, load_pt, number_in
from convert.sources.consistency import CURE
from convert.sources.source import Sharded, end_to_end
from training.checkpoint.files import StoredTensor
from training.moments import ADAMW

Shapes = Mapping[str, tuple[int, ...]]
"""Names and shapes in the order of the flat data."""
_STATES = "optimizer_state_dict"
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
_STAGE3, _STAGE12 = "fp32_flat_groups", "single_partition_of_fp32_groups"


@dataclass(frozen=True)
class Partition:
    """The content of one file; tuples are per group of parameters."""

    path: Path
    stage: int
    ranks: int | None
    """Data ranks that share the parameters; None if the file does not say."""
    masters: tuple[StoredTensor, ...]
    """Flat weights, float32 unless configured otherwise."""
    moments: Mapping[str, tuple[StoredTensor, ...]]
    """`exp_avg` and `exp_avg_sq`, flat as the masters; empty for other optimizers than Adam."""
    step: int | None
    version: Any
    paddings: tuple[tuple[int, ...], ...]
    """Elements after each parameter; empty if there are none."""

    @property
    def shared(self) -> Mapping[str, Any]:
        """The values that all optimizer files of a save share."""
        return {
            "ZeRO stage": self.stage,
            "partition_count": self.ranks,
            "ds_version": self.version,
            "step of the optimizer": self.step,
            "number of groups": len(self.masters),
            "type of the weights": " and ".join(sorted({str(tensor.dtype) for tensor in self.masters})),
        }


def read_partition(path: Path) -> Partition:
    """Open a file; of its tensors only the step is read. CheckpointError if it is another file."""
    content = fields(load_pt(path))
    states = fields(content.get(_STATES))
    stage3 = _STAGE3 in states
    groups = _list(states.get(_STAGE3 if stage3 else _STAGE12))
    masters = _flat(groups)
    if not states or len(masters) != len(groups):
        raise CheckpointError(f"{path}: has no {_STATES} with flat weights; copy the file again from the run")
    base = states.get(_STATES if stage3 else "base_optimizer_state")
    adam = base if isinstance(base, list) else list(fields(fields(base).get("state")).values())
    moments = {kind: _flat([fields(state).get(kind) for state in adam]) for kind in ADAMW}
    # Adam's steps: in each tensor's state, or in the options of its group, or beside them
    steps = (fields(place).get("step") for place in (*adam, *_list(fields(base).get("param_groups"))))
    stage, counts = states.get("zero_stage"), states.get("partition_count")
    return Partition(
        path=path,
        stage=3 if stage3 else _STAGES.get(enum_member(stage) or "") or number_in(stage) or 1,  # none: BF16_Optimizer
        ranks=max(filter(None, map(number_in, _list(counts) or [counts])), default=None),
        masters=masters,
        moments=moments if all(len(flat) == len(masters) for flat in moments.values()) else {},
        step=number_in(*steps, states.get("base_optimizer_state_step")),
        version=content.get("ds_version") or states.get("ds_version"),
        paddings=tuple(tuple(group) for group in _list(states.get("param_alignment_paddings"))),
    )


def cut(row: Sequence[Partition], shapes: Sequence[Shapes]) -> dict[str, dict[str, Sharded]]:
    """A model-parallel rank's float32 weights ("") and moments by name, from its partitions.

    `shapes` is the model file's param_shapes: the parameters of each group, in order.
    """
    flats = {"": [partition.masters for partition in row]}
    moments = {kind: [partition.moments.get(kind, ()) for partition in row] for kind in ADAMW}
    if all(flat for ranks in moments.values() for flat in ranks):
        flats |= moments
    try:
        return {kind: _cut(row[0], shapes, ranks) for kind, ranks in flats.items()}
    except CheckpointError as error:
        raise CheckpointError(f"{row[0].path}: {error}") from None


def _cut(first: Partition, shapes: Sequence[Shapes], ranks: Sequence[Sequence[StoredTensor]]) -> dict[str, Sharded]:
    """The parameters from the flat tensors of each rank and group."""
    if first.stage == 3:
        return cut_stage3({name: shape for group in shapes for name, shape in group.items()}, ranks)
    if len(shapes) != len(ranks[0]):
        raise CheckpointError(
            f"{len(ranks[0])} groups of parameters, but {len(shapes)} in the model file's param_shapes; {CURE}"
        )
    parameters: dict[str, Sharded] = {}
    for number, group in enumerate(shapes):
        paddings = first.paddings[number] if number < len(first.paddings) else ()
        parameters |= cut_group(group, [flats[number] for flats in ranks], paddings)
    return parameters


def cut_group(shapes: Shapes, partitions: Sequence[StoredTensor], paddings: Sequence[int] = ()) -> dict[str, Sharded]:
    """Stages 1 and 2: the parameters of a group, from its partitions in order of the data ranks.

    `paddings`: elements after each parameter. CheckpointError if the partitions hold other sizes.
    """
    paddings = paddings or [0] * len(shapes)
    sizes = (math.prod(shape) + padding for shape, padding in zip(shapes.values(), paddings, strict=True))
    starts = list(accumulate(sizes, initial=0))
    flat, alignment = end_to_end(partitions), 2 * len(partitions)
    # the group is padded to a multiple of the alignment; a writer may cut the padding off again
    if not starts[-1] <= flat.shape[0] <= -(-starts[-1] // alignment) * alignment:
        raise _wrong_size(flat.shape[0], shapes, len(partitions))
    return {
        name: flat.rows(start, start + math.prod(shape)).view(shape)
        for start, (name, shape) in zip(starts, shapes.items(), strict=False)
    }


def cut_stage3(shapes: Shapes, partitions: Sequence[Sequence[StoredTensor]]) -> dict[str, Sharded]:
    """Stage 3: the parameters of all groups, from `partitions[data rank][group]`."""
    ranks, start, parameters = [end_to_end(groups) for groups in partitions], 0, dict[str, Sharded]()
    expected = sum(-(-math.prod(shape) // len(ranks)) for shape in shapes.values())
    for rank in ranks:
        if rank.shape[0] != expected:
            raise _wrong_size(rank.shape[0] * len(ranks), shapes, len(ranks))
    for name, shape in shapes.items():
        size = math.prod(shape)
        share = -(-size // len(ranks))
        shares = [
            rank.rows(start, start + max(0, min(share, size - number * share))) for number, rank in enumerate(ranks)
        ]
        parameters[name] = end_to_end(block.tensor for held in shares for block in held.blocks).view(shape)
        start += share
    return parameters


def _wrong_size(held: int, shapes: Shapes, ranks: int) -> CheckpointError:
    needed = sum(map(math.prod, shapes.values()))
    return CheckpointError(
        f"the partitions of {ranks} data ranks hold {held} elements, but the parameters have {needed}; "
        "the files are of different runs, or the optimizer state was not in memory when they were saved"
    )


def _flat(groups: Sequence[Any]) -> tuple[StoredTensor, ...]:
    """The flat tensors of all groups; empty if a group has another object."""
    flat = tuple(tensor for tensor in groups if isinstance(tensor, StoredTensor) and len(tensor.shape) == 1)
    return flat if len(flat) == len(groups) else ()


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
