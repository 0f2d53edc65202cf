"""DeepSpeed's checkpoints of GPT-2: ZeRO 0 to 3, tensor ranks, pipeline modules; names of transformers or of Megatron.

    mp_rank_MM_model_states.pt                          ZeRO 0 to 2, one per model-parallel rank
    zero_pp_rank_D_mp_rank_MM_model_states.pt           ZeRO 3, with empty weights
    [bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt    ZeRO 1 to 3, a partition of the float32 weights
    layer_LL[-model_TT]-model_states.pt                 pipeline modules, one per layer and tensor rank TT

D is the data rank. MM is the tensor rank; in a pipeline, stage x tensor ranks + tensor rank. The float32 weights of the
optimizer files are preferred over the 16-bit weights of the model files.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from convert.arguments import Options
from convert.pt import fields, load_pt
from convert.sources.consistency import CURE, Grid, check_alike, check_count, check_distinct, file_error, grid
from convert.sources.deepspeed_model import Stages, State, build, module_of
from convert.sources.source import Source
from convert.sources.zero import Partition, cut, cut_stage3, number_in, read_partition
from convert.stored import Stored, StoredTensor

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<column>\d+)_)?mp_rank_(?P<row>\d+)_model_states\.pt")
# before March 2021 without the underscore before optim
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<column>\d+)_mp_rank_(?P<row>\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<row>\d+)(?:-model_(?P<column>\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_.*|expp_rank_.*")
_SAME = ("ds_version", "global_steps", "iteration", "dp_world_size", "mp_world_size")  # in all model files of a save


@dataclass(frozen=True)
class _Save:
    """The files of one save; the lists are by model-parallel rank, then by data rank."""

    models: Sequence[Sequence[State]]
    """The content of the model files; of one data rank below ZeRO 3."""
    partitions: Sequence[Sequence[Partition]]
    layers: Mapping[int, Sequence[Mapping[str, Stored]]]
    """The tensors of the pipeline's modules: by number of the layer, then by tensor rank."""
    files: Sequence[Path]
    stage: int
    """Of ZeRO."""

    @property
    def state(self) -> State:
        """The first model file; empty if there is none."""
        return self.models[0][0] if self.models else {}

    @property
    def tensor_ranks(self) -> int:
        """Ranks over which each matrix is split."""
        return len(next(iter(self.layers.values()))) if self.layers else len(self.models)


def matches(folder: Path) -> bool:
    """Whether the folder has a file with one of DeepSpeed's names."""
    return any(pattern.fullmatch(path.name) for path in folder.iterdir() for pattern in (_MODEL, _OPTIMIZER, _LAYER))


def open_folder(folder: Path, options: Options) -> Source:
    """The checkpoint in a tag's folder. Raises CheckpointError with one line that names the file and the cure."""
    save = _open(folder)
    trained, notes = _optimizer_weights(save)
    if save.stage == 3 and not trained:
        raise file_error(folder, f"ZeRO 3 without float32 weights in *_optim_states.pt; {CURE}")
    first, stages = save.partitions[0][0] if save.partitions else None, len(save.models) // save.tensor_ranks
    zero = f"ZeRO {save.stage} over {len(save.partitions[0])} data ranks" if save.partitions else "ZeRO 0"
    if not save.partitions and save.state.get("param_shapes"):
        zero = "ZeRO without its optimizer files"
    pipeline = f", pipeline {stages} in {len(save.layers)} layer files" if save.layers else ""
    return build(
        folder,
        options,
        save.state,
        _model_weights(save),
        trained,
        layout=f"{zero}{pipeline}, tensor {save.tensor_ranks}",
        shards=save.tensor_ranks,
        files=save.files,
        version=save.state.get("ds_version") or (first and first.version),
        step=first.step if first else None,
        notes=notes,
        facts={"zero_stage": save.stage, "tensor_ranks": save.tensor_ranks, "pipeline_stages": stages},
        cure=f"{CURE}; without *_optim_states.pt the latter are taken",
    )


def read_models(folder: Path) -> tuple[Grid, list[list[State]]]:
    """The model files and their contents. Raises CheckpointError unless they are all those of one save."""
    files = grid(folder.iterdir(), _MODEL)
    models = [[open_state(path) for path in row] for row in files]
    check_alike(
        (path, {"module": "module" in state} | {key: _plain(state.get(key)) for key in _SAME})
        for paths, row in zip(files, models, strict=True)
        for path, state in zip(paths, row, strict=True)
    )
    if files:
        ranks = number_in(models[0][0].get("mp_world_size"))
        check_count(files, _MODEL, "row", ranks, "mp_rank files")
    return files, models


def open_state(path: Path) -> State:
    """The content of a file. Raises CheckpointError if it holds none."""
    state = fields(load_pt(path))
    if not state:
        raise file_error(path, "holds no dict of values; copy it again from the run")
    return state


def module_weights(models: Sequence[Sequence[State]]) -> list[dict[str, Stored]]:
    """The tensors of the model files by key, one dict per model-parallel rank; ZeRO 3's are empty and left out."""
    return [
        {key: tensor for key, tensor in _tensors_of(states[0].get("module")).items() if 0 not in tensor.shape}
        for states in models
    ]


def param_shapes(state: State) -> list[dict[str, tuple[int, ...]]]:
    """The parameters that the optimizer had, with their shapes on one tensor rank, per group."""
    groups = state.get("param_shapes")
    return [
        {key: tuple(shape) for key, shape in fields(group).items()}
        for group in groups or ()
        if isinstance(groups, list)
    ]


def _open(folder: Path) -> _Save:
    """Open every file. Raises CheckpointError naming one that is missing, damaged or of another save."""
    if expert := next((path for path in sorted(folder.iterdir()) if _EXPERT.fullmatch(path.name)), None):
        raise file_error(expert, "weights of an expert: a mixture of experts is no GPT-2")
    optimizer_files, layer_files = (
        grid(folder.iterdir(), kind, sparse=kind is _LAYER) for kind in (_OPTIMIZER, _LAYER)
    )
    model_files, models = read_models(folder)
    if not model_files and (optimizer_files or not layer_files):
        raise file_error(folder / "mp_rank_00_model_states.pt", f"missing; {CURE}")
    partitions = [[read_partition(path) for path in row] for row in optimizer_files]
    stage = partitions[0][0].stage if partitions else 3 if models and "zero_pp" in model_files[0][0].name else 0
    if partitions:
        check_count(optimizer_files, _OPTIMIZER, "row", len(model_files), "mp_rank files")
        check_count(optimizer_files, _OPTIMIZER, "column", partitions[0][0].ranks, "data ranks")
        if stage == 3:
            check_count(model_files, _MODEL, "column", len(optimizer_files[0]), "data ranks")
        check_alike((one.path, _shared(one)) for row in partitions for one in row)
    layers = {_number(row[0]): [_tensors_of(open_state(path)) for path in row] for row in layer_files}
    for number in {module_of(key) for states in models for group in param_shapes(states[0]) for key in group}:
        if layers and number is not None and number not in layers:
            raise file_error(folder / f"layer_{number:02d}-model_00-model_states.pt", f"missing; {CURE}")
    files = [path for row in (*model_files, *optimizer_files, *layer_files) for path in row]
    return _Save(models, partitions, layers, files, stage)


def _shared(partition: Partition) -> Mapping[str, Any]:
    """What all optimizer files of a save have in common."""
    return {
        "ZeRO stage": partition.stage,
        "partition_count": partition.ranks,
        "ds_version": partition.version,
        "step of the optimizer": partition.step,
        "number of groups": len(partition.masters),
        "type of the weights": " and ".join(sorted({str(tensor.dtype) for tensor in partition.masters})),
    }


def _number(path: Path) -> int:
    match = _LAYER.fullmatch(path.name)
    assert match is not None
    return int(match["row"])


def _tensors_of(value: Any, prefix: str = "") -> dict[str, Stored]:
    """The tensors of a state dict by key; nested dicts (Megatron's) are joined with dots, other values are left out."""
    found: dict[str, Stored] = {}
    for key, item in value.items() if isinstance(value, Mapping) else ():
        if isinstance(item, StoredTensor):
            found[f"{prefix}{key}"] = item
        else:
            found |= _tensors_of(item, f"{prefix}{key}.")
    return found


def _model_weights(save: _Save) -> Stages:
    """What the model files and the layer files hold: 16-bit weights, or all of a run without float32 weights."""
    if save.layers:
        return [
            (f"layer_{number:02d}", [{f"{number}.{key}": tensor for key, tensor in rank.items()} for rank in ranks])
            for number, ranks in save.layers.items()
        ]
    ranks = module_weights(save.models)
    for states, found in zip(save.models, ranks, strict=True):
        for key, shape in fields(states[0].get("frozen_param_shapes")).items() if save.stage == 3 else ():
            shares = [share for state in states if (share := fields(state.get("frozen_param_fragments")).get(key))]
            if len(shares) < len(states):
                raise CheckpointError(f"tensor {key!r}: its share of a data rank is missing; {CURE}")
            found |= cut_stage3({key: tuple(shape)}, [[share] for share in shares])
    return [("", ranks)]


def _optimizer_weights(save: _Save) -> tuple[dict[str, Stages], tuple[str, ...]]:
    """The float32 weights ("") and Adam's moments, and notes; empty if the files do not name them."""
    if not save.partitions:
        if save.state.get("param_shapes"):
            return {}, ("no *_optim_states.pt, which hold the float32 weights: those of the model files are taken",)
        if fields(save.state.get("optimizer")).keys() & {"fp32_groups", "fp32_groups_flat"}:
            return {}, ("without ZeRO the float32 weights have no names: those of the model files are taken",)
        return {}, ()
    ranks = []
    for states, row in zip(save.models, save.partitions, strict=True):
        if not (shapes := param_shapes(states[0])) or not row[0].masters:
            return {}, ("the optimizer files do not name the float32 weights: those of the model files are taken",)
        check_distinct(partition.masters[0] for partition in row)
        ranks.append(cut(row, shapes))
    trained = {kind: _stages([rank[kind] for rank in ranks], save.tensor_ranks) for kind in ranks[0]}
    return trained, () if len(trained) > 1 else ("the optimizer has no moments of Adam",)


def _stages(ranks: Sequence[Mapping[str, Stored]], shards: int) -> Stages:
    return [
        (f"pipeline stage {start // shards}", ranks[start : start + shards]) for start in range(0, len(ranks), shards)
    ]


def _plain(value: Any) -> Any:
    return number_in(value) if isinstance(value, StoredTensor) else value
