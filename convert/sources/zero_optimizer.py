"""DeepSpeed's *_optim_states.pt: one data rank's partition of the float32 weights and of Adam's moments."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from convert.files.inert import Inert, fields, load_inert
from convert.files.stored import LoadedTensor, Stored, StoredTensor
from convert.sources.ranks import file_error
from convert.sources.source import MOMENTS
from convert.sources.zero import Shapes, cut_group, cut_stage3

_STATES = "optimizer_state_dict"
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
_STAGE3, _STAGE12 = "fp32_flat_groups", "single_partition_of_fp32_groups"


@dataclass(frozen=True)
class Partition:
    """What one file holds; tuples are per group of parameters."""

    path: Path
    stage: int
    ranks: int | None
    """Data ranks that share the parameters; None if the file does not say."""
    masters: tuple[Stored, ...]
    """Flat weights, float32 unless DeepSpeed was told otherwise; empty if the file has none by a name that is known."""
    moments: Mapping[str, tuple[Stored, ...]]
    """`exp_avg` and `exp_avg_sq`, flat as the masters; empty for other optimizers than Adam."""
    step: int | None
    version: str | None
    shapes: Any
    """param_shapes, which is in the model file since DeepSpeed 0.6."""
    paddings: tuple[tuple[int, ...], ...]
    """Elements after each parameter; empty if there are none."""


def read_partition(path: Path) -> Partition:
    """Open a file; no tensor data but the step is read. Raises CheckpointError if it is no optimizer file."""
    content = fields(load_inert(path))
    states = content.get(_STATES)
    if not isinstance(states, Mapping):
        raise file_error(path, f"has no {_STATES}; copy the file again from the run")
    stage3 = _STAGE3 in states
    flat = _list(states.get(_STAGE3 if stage3 else _STAGE12))
    masters = _flat(flat)
    if len(masters) != len(flat):
        raise file_error(path, "its float32 weights are no flat tensors; copy the file again from the run")
    base = states.get(_STATES if stage3 else "base_optimizer_state")
    groups = base if isinstance(base, list) else list(fields(fields(base).get("state")).values())
    moments = {kind: _flat([fields(group).get(kind) for group in groups]) for kind in MOMENTS}
    counts = states.get("partition_count")
    numbers = [number_in(count) for count in (counts if isinstance(counts, list | tuple) else [counts])]
    version = content.get("ds_version") or states.get("ds_version")
    return Partition(
        path=path,
        stage=3 if stage3 else number_in(states.get("zero_stage")) or 1,  # BF16_Optimizer says none
        ranks=max((number for number in numbers if number), default=None),
        masters=masters,
        moments=moments if all(len(flat) == len(masters) for flat in moments.values()) else {},
        step=step_of(states, base, groups),
        version=version if isinstance(version, str) else None,
        shapes=content.get("param_shapes"),
        paddings=tuple(tuple(group) for group in _list(states.get("param_alignment_paddings"))),
    )


def cut(row: Sequence[Partition], shapes: Any) -> tuple[dict[str, Stored], dict[str, dict[str, Stored]]]:
    """A model-parallel rank's float32 weights and both moments by name, from its data ranks' partitions in order.

    `shapes` is the model file's param_shapes: per group, the parameters in the order of the flat data.
    """
    lengths = [sum(partition.masters[group].shape[0] for partition in row) for group in range(len(row[0].masters))]
    moments = {kind: [partition.moments.get(kind, ()) for partition in row] for kind in MOMENTS}
    if not all(flat for flats in moments.values() for flat in flats):
        moments = {}
    try:
        groups = _groups(shapes, lengths if row[0].stage < 3 else None)
        weights = _cut(row, groups, [partition.masters for partition in row])
        return weights, {kind: _cut(row, groups, flats) for kind, flats in moments.items()}
    except CheckpointError as error:
        raise file_error(row[0].path, error) from None


def is_stored(value: Any) -> bool:
    """Whether a value of an opened file is a tensor."""
    return isinstance(value, StoredTensor | LoadedTensor)


def number_in(value: Any) -> int | None:
    """An integer that is stored as itself, as a tensor, or as the member of an enumeration."""
    if isinstance(value, Inert):
        value = _STAGES.get(value.member) if value.member else next(iter(value.args), None)
    if is_stored(value):
        value = value.read().item() if math.prod(value.shape) == 1 else None
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _cut(row: Sequence[Partition], groups: Sequence[Shapes], flats: Sequence[Sequence[Stored]]) -> dict[str, Stored]:
    if row[0].stage == 3:
        return dict(cut_stage3({name: shape for group in groups for name, shape in group.items()}, flats))
    found: dict[str, Stored] = {}
    for number, group in enumerate(groups):
        paddings = row[0].paddings[number] if number < len(row[0].paddings) else ()
        if paddings and len(paddings) != len(group):
            raise CheckpointError(
                f"{len(paddings)} paddings of {len(group)} parameters; the files are of different saves"
            )
        found |= cut_group(group, [flat[number] for flat in flats], paddings)
    return found


def _groups(shapes: Any, lengths: Sequence[int] | None) -> list[dict[str, tuple[int, ...]]]:
    """param_shapes per group; before DeepSpeed 0.5.2 it was one dict, whose groups fill flat tensors of `lengths`."""
    groups = [{name: tuple(shape) for name, shape in fields(group).items()} for group in _list(shapes) or [shapes]]
    if lengths is None:
        return groups
    if isinstance(shapes, Mapping):
        left, groups = list(groups[0].items()), []
        for length in lengths:
            group: dict[str, tuple[int, ...]] = {}
            while left and sum(map(math.prod, group.values())) + math.prod(left[0][1]) <= length:
                name, shape = left.pop(0)
                group[name] = shape
            groups.append(group)
    if len(groups) != len(lengths):
        raise CheckpointError(
            f"param_shapes has {len(groups)} groups of parameters, the optimizer files have {len(lengths)}; "
            "the files are of different saves"
        )
    return groups


def _flat(groups: Sequence[Any]) -> tuple[Stored, ...]:
    """The flat tensors of all groups; empty if one is none."""
    flat = tuple(tensor for tensor in groups if is_stored(tensor) and len(tensor.shape) == 1)
    return flat if len(flat) == len(groups) else ()


def step_of(states: Mapping[str, Any], base: Any, groups: Sequence[Any]) -> int | None:
    """Adam's steps: in each tensor's state, or in the options of its group, or beside them."""
    options = _list(fields(base).get("param_groups"))
    places = [*groups, *options, {"step": states.get("base_optimizer_state_step")}]
    return next((step for place in places if (step := number_in(fields(place).get("step"))) is not None), None)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
