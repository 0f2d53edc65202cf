"""The files of a DeepSpeed save, opened and checked: they must be complete, and of one save.

    mp_rank_MM_model_states.pt                          ZeRO 0 to 2, per model-parallel rank
    zero_pp_rank_D_mp_rank_MM_model_states.pt           ZeRO 3, with empty weights
    [bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt    ZeRO 1 to 3, a part of the float32 weights
    layer_LL[-model_TT]-model_states.pt                 pipeline modules, per layer, tensor rank TT

D is the data rank. MM is the tensor rank; in a pipeline, stage x tensor ranks + tensor rank.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from convert.megatron_args import check_ranks
from convert.pt import fields, flatten, load_pt, number_in
from convert.sources.consistency import CURE, Grid, check_alike, check_count, grid
from convert.sources.names import module_of
from convert.sources.source import Sharded, whole
from convert.sources.zero import Partition, read_partition
from training.checkpoint.files import StoredTensor

State = Mapping[str, Any]
"""The content of a model file."""
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<column>\d+)_)?mp_rank_(?P<row>\d+)_model_states\.pt")
# before March 2021 without the underscore before optim
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<column>\d+)_mp_rank_(?P<row>\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<row>\d+)(?:-model_(?P<column>\d+))?-model_states\.pt")
PATTERNS = (_MODEL, _OPTIMIZER, _LAYER)
"""The names of the three kinds of files."""
_NUMBERS = ("global_steps", "iteration", "dp_world_size", "mp_world_size")  # the same in all model files of a save


@dataclass(frozen=True)
class Save:
    """The files of one save; the lists are by model-parallel rank, then by data rank."""

    models: Sequence[Sequence[State]]
    """The content of the model files; below ZeRO 3 only data rank 0 has one."""
    partitions: Sequence[Sequence[Partition]]
    """The content of the optimizer files."""
    layers: Mapping[int, Sequence[Mapping[str, Sharded]]]
    """The tensors of the pipeline's modules: by number of the layer, then by tensor rank."""
    files: Sequence[Path]

    @property
    def state(self) -> State:
        """The first model file; empty if there is none."""
        return self.models[0][0] if self.models else {}

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        if self.partitions:
            return self.partitions[0][0].stage
        return 3 if self.files[0].name.startswith("zero_pp") else 0

    @property
    def tensor_ranks(self) -> int:
        """Ranks over which each matrix is split."""
        return len(next(iter(self.layers.values()))) if self.layers else len(self.models)

    @property
    def pipeline(self) -> int:
        """Stages of the pipeline; 0 without model files."""
        return len(self.models) // self.tensor_ranks

    @property
    def layout(self) -> str:
        """The layout in words."""
        if self.partitions:
            zero = f"ZeRO {self.stage} over {len(self.partitions[0])} data ranks"
        else:
            zero = "ZeRO without its optimizer files" if self.state.get("param_shapes") else "ZeRO 0"
        pipeline = f", pipeline {self.pipeline} in {len(self.layers)} layer files" if self.layers else ""
        return f"{zero}{pipeline}, tensor {self.tensor_ranks}"


def open_save(folder: Path) -> Save:
    """Open every file. Raises CheckpointError naming a missing, damaged or foreign file.

    Model files come first: they record the ranks, so which optimizer files there are, and the
    parameters, so which layer files there are.
    """
    model_files, optimizer_files, layer_files = (
        grid(folder.iterdir(), kind, sparse=kind is _LAYER) for kind in PATTERNS
    )
    if not model_files and (optimizer_files or not layer_files):
        raise CheckpointError(f"{folder}/mp_rank_00_model_states.pt: missing; {CURE}")
    models = _open_models(model_files)
    partitions = _open_partitions(optimizer_files, model_files)
    layers = _open_layers(layer_files, models)
    files = [path for row in (*model_files, *optimizer_files, *layer_files) for path in row]
    save = Save(models, partitions, layers, files)
    rank_args = [
        (path, fields(state.get("args")), (rank % save.tensor_ranks, rank // save.tensor_ranks))
        for rank, (paths, states) in enumerate(zip(model_files, models, strict=True))
        for path, state in zip(paths, states, strict=True)
    ]
    check_ranks(rank_args, save.tensor_ranks, save.pipeline)
    return save


def _open_models(files: Grid) -> list[list[State]]:
    """The content of the model files, which share versions, counters and numbers of ranks."""
    models = [[_open_state(path) for path in row] for row in files]
    check_alike(
        (
            path,
            {"module": "module" in state, "ds_version": state.get("ds_version")}
            | {key: number_in(state.get(key)) for key in _NUMBERS},
        )
        for paths, states in zip(files, models, strict=True)
        for path, state in zip(paths, states, strict=True)
    )
    if models:
        check_count(files, _MODEL, "row", number_in(models[0][0].get("mp_world_size")), "mp_rank files")
    return models


def _open_partitions(files: Grid, model_files: Grid) -> list[list[Partition]]:
    """The content of the optimizer files: one per data rank, for each model-parallel rank."""
    partitions = [[read_partition(path) for path in row] for row in files]
    if partitions:
        first = partitions[0][0]
        check_count(files, _OPTIMIZER, "row", len(model_files), "mp_rank files")
        check_count(files, _OPTIMIZER, "column", first.ranks, "data ranks")
        if first.stage == 3:  # here each data rank has a model file, too
            check_count(model_files, _MODEL, "column", len(files[0]), "data ranks")
        check_alike((partition.path, partition.shared) for row in partitions for partition in row)
    return partitions


def _open_layers(files: Grid, models: Sequence[Sequence[State]]) -> dict[int, list[dict[str, Sharded]]]:
    """The tensors of the layer files, by number; a module without parameters has no file."""
    layers = {
        int(re.findall(r"\d+", row[0].name)[0]): [dict(tensors_in(_open_state(path))) for path in row] for row in files
    }
    parameters = (key for ranks in models for group in param_shapes(ranks[0]) for key in group)
    modules = {number for key in parameters if (number := module_of(key)) is not None}
    for number in sorted(modules - layers.keys()) if layers else ():
        raise CheckpointError(f"{files[0][0].parent}/layer_{number:02d}-model_00-model_states.pt: missing; {CURE}")
    return layers


def _open_state(path: Path) -> State:
    """The content of a file. CheckpointError if it is empty, or split by DeepSpeed's AutoTP."""
    state = fields(load_pt(path))
    ranks = fields(fields(state.get("ds_config")).get("tensor_parallel")).get("autotp_size")
    if isinstance(ranks, int) and ranks > 1:
        raise CheckpointError(
            f"{path}: split over {ranks} ranks by DeepSpeed's AutoTP, whose order of rows is not recorded; save it "
            "with engine.save_16bit_model, which joins the ranks"
        )
    if not state:
        raise CheckpointError(f"{path}: holds no dict of values; copy it again from the run")
    return state


def param_shapes(state: State) -> list[dict[str, tuple[int, ...]]]:
    """The parameters that the optimizer had, with their shapes on one tensor rank, per group."""
    return [{key: tuple(shape) for key, shape in fields(group).items()} for group in state.get("param_shapes") or ()]


def tensors_in(tree: Any) -> Iterator[tuple[str, Sharded]]:
    """The tensors of a state dict by key; keys of nested dicts are joined with dots."""
    return ((key, whole(value)) for key, value in flatten(tree) if isinstance(value, StoredTensor))
