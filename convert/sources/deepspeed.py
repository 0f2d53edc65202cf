"""DeepSpeed's checkpoints of GPT-2: ZeRO 0 to 3, tensor ranks, pipeline modules; names of transformers or of Megatron.

    mp_rank_MM_model_states.pt                          ZeRO 0 to 2, one per model-parallel rank
    zero_pp_rank_D_mp_rank_MM_model_states.pt           ZeRO 3, with empty weights
    [bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt    ZeRO 1 to 3, a partition of the float32 weights
    layer_LL[-model_TT]-model_states.pt                 pipeline modules, one per layer and tensor rank TT

D is the data rank. MM is the tensor rank; in a pipeline, stage x tensor ranks + tensor rank. The float32 weights of the
optimizer files are preferred over the 16-bit weights of the model files.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.tokenizer import Tokenizer
from convert.arguments import Options
from convert.megatron_args import check_ranks, read_args
from convert.pt import fields, flatten, load_pt, number_in
from convert.sources.consistency import (
    CURE,
    Grid,
    check_agreement,
    check_alike,
    check_count,
    check_distinct,
    grid,
    iteration_of,
)
from convert.sources.huggingface import recorded_in
from convert.sources.names import Name, module_of, translate
from convert.sources.ranks import architecture, join_ranks, join_stages, qkv_order, tie_head
from convert.sources.source import Recorded, Sharded, Source, whole
from convert.sources.zero import Partition, cut, read_partition
from training.checkpoint.files import StoredTensor
from training.huggingface.config import CONFIG, read_raw_config
from training.huggingface.tokenizer import read_tokenizer
from training.moments import ADAMW
from training.tensors import leaf_of

State = Mapping[str, Any]
"""The content of a model file."""
Stages = Sequence[tuple[str, Sequence[Mapping[str, Sharded]]]]
"""Stages of a pipeline (or its modules): a name, and the tensors of each tensor rank by key."""
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<column>\d+)_)?mp_rank_(?P<row>\d+)_model_states\.pt")
# before March 2021 without the underscore before optim
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<column>\d+)_mp_rank_(?P<row>\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<row>\d+)(?:-model_(?P<column>\d+))?-model_states\.pt")
_SAME = ("ds_version", "global_steps", "iteration", "dp_world_size", "mp_world_size")  # in all model files of a save
_2019 = re.compile(r"(?:module\.)*transformer\.layers\.\d+\.attention\.query_key_value\.weight")
_UNNAMED = {"fp32_groups", "fp32_groups_flat"}  # the float32 weights of a training without ZeRO


@dataclass(frozen=True)
class _Save:
    """The files of one save; the lists are by model-parallel rank, then by data rank."""

    models: Sequence[Sequence[State]]
    """The content of the model files; of one data rank below ZeRO 3."""
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


def matches(folder: Path) -> bool:
    """Whether the folder has a file with one of DeepSpeed's names."""
    return any(pattern.fullmatch(path.name) for path in folder.iterdir() for pattern in (_MODEL, _OPTIMIZER, _LAYER))


def open_folder(folder: Path, options: Options) -> Source:
    """The checkpoint in a tag's folder. Raises CheckpointError with one line that names the file and the cure."""
    save = _open(folder)
    state, shards, model_weights = save.state, save.tensor_ranks, _model_weights(save)
    optimizer_weights, notes = _optimizer_weights(save)
    master_weights = optimizer_weights.get("", ())
    if save.stage == 3 and not master_weights:
        raise CheckpointError(f"{folder}: ZeRO 3 without float32 weights in *_optim_states.pt; {CURE}")
    keys = (key for _, ranks in (*model_weights, *master_weights) for rank in ranks for key in rank)
    names = translate(keys, fields(state.get("shared_params")))  # none below ZeRO 1
    megatron = not any(name.family == "transformers" for name in names.values() if name.layer is not None)
    conv1d = not megatron and _is_conv1d((*master_weights, *model_weights), names)
    recorded, tokenizer = _read_recorded(folder, state, options, megatron)
    tensors, tied_note = tie_head(_join(model_weights, names, conv1d), recorded.tied)
    masters, *moments = (_join(optimizer_weights.get(kind, ()), names, conv1d) for kind in ("", *ADAMW))
    model, assumed = architecture({**tensors, **masters}, recorded, conv1d=conv1d, shards=shards)
    check_agreement(tensors, masters)
    tensors |= masters
    if masters and (frozen := len(tensors) - len(masters)):
        assumed += (
            f"{frozen} tensors were not trained and have no float32 weights; those of the model files are taken",
        )
    first = save.partitions[0][0] if save.partitions else None
    deepspeed_version = state.get("ds_version") or (first and first.version)
    types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    args = fields(state.get("args"))
    qkv_version = number_in(state.get("checkpoint_version"), args.get("checkpoint_version")) if megatron else 0
    iteration, samples = _progress(folder, state)
    return Source(
        path=folder,
        layout=f"DeepSpeed {deepspeed_version or 'of unknown version'}, {save.layout}, names of "
        f"{'Megatron' if megatron else 'transformers'}, {' and '.join(types)} {'masters' if masters else 'weights'}",
        model=model,
        qkv=qkv_order(qkv_version, options, shards, default=0 if any(map(_2019.fullmatch, names)) else None),
        tensors=tensors,
        files=tuple(save.files),
        conv1d=conv1d,
        iteration=iteration,
        consumed_samples=samples,
        notes=(*notes, *assumed, *tied_note),
        moments=dict(zip(ADAMW, moments, strict=True)),
        step=first.step if first else None,
        tokenizer=tokenizer,
        facts={
            "deepspeed": deepspeed_version,
            "zero_stage": save.stage,
            "tensor_ranks": shards,
            "pipeline_stages": save.pipeline,
        },
    )


def _open(folder: Path) -> _Save:
    """Open every file. Raises CheckpointError naming one that is missing, damaged or of another save.

    Model files come first: the ranks that they record tell which optimizer files there are, and the parameters that
    they list tell which layer files there are.
    """
    model_files, optimizer_files, layer_files = (
        grid(folder.iterdir(), kind, sparse=kind is _LAYER) for kind in (_MODEL, _OPTIMIZER, _LAYER)
    )
    if not model_files and (optimizer_files or not layer_files):
        raise CheckpointError(f"{folder}/mp_rank_00_model_states.pt: missing; {CURE}")
    models = _open_models(model_files)
    partitions = _open_partitions(optimizer_files, model_files)
    layers = _open_layers(layer_files, models)
    files = [path for row in (*model_files, *optimizer_files, *layer_files) for path in row]
    save, rank_args = _Save(models, partitions, layers, files), []
    for rank, (paths, states) in enumerate(zip(model_files, models, strict=True)):
        place = rank % save.tensor_ranks, rank // save.tensor_ranks
        rank_args += [(path, fields(state.get("args")), place) for path, state in zip(paths, states, strict=True)]
    check_ranks(rank_args, save.tensor_ranks, save.pipeline)
    return save


def _open_models(files: Grid) -> list[list[State]]:
    """The content of the model files, which share versions, counters and numbers of ranks."""
    models = [[_open_state(path) for path in row] for row in files]
    check_alike(
        (path, {"module": "module" in state} | {key: _plain(state.get(key)) for key in _SAME})
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
    """The tensors of the layer files by number; the numbers have gaps, but no module with parameters is missing."""
    layers = {
        int(re.findall(r"\d+", row[0].name)[0]): [dict(_tensors_in(_open_state(path))) for path in row] for row in files
    }
    parameters = (key for ranks in models for group in _param_shapes(ranks[0]) for key in group)
    modules = {number for key in parameters if (number := module_of(key)) is not None}
    for number in sorted(modules - layers.keys()) if layers else ():
        raise CheckpointError(f"{files[0][0].parent}/layer_{number:02d}-model_00-model_states.pt: missing; {CURE}")
    return layers


def _open_state(path: Path) -> State:
    """The content of a file. Raises CheckpointError if it is empty, or split by DeepSpeed's AutoTP."""
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


def _plain(value: Any) -> Any:
    return number_in(value) if isinstance(value, StoredTensor) else value


def _param_shapes(state: State) -> list[dict[str, tuple[int, ...]]]:
    """The parameters that the optimizer had, with their shapes on one tensor rank, per group."""
    return [{key: tuple(shape) for key, shape in fields(group).items()} for group in state.get("param_shapes") or ()]


def _tensors_in(tree: Any) -> Iterator[tuple[str, Sharded]]:
    """The tensors of a state dict by key, those of nested dicts (Megatron's) by keys joined with dots."""
    return ((key, whole(value)) for key, value in flatten(tree) if isinstance(value, StoredTensor))


def _model_weights(save: _Save) -> Stages:
    """The weights in model and layer files: 16-bit, or all of a run without float32 weights."""
    if save.layers:
        return [
            (f"layer_{number:02d}", [{f"{number}.{key}": tensor for key, tensor in rank.items()} for rank in ranks])
            for number, ranks in save.layers.items()
        ]
    modules = [_tensors_in(states[0].get("module")) for states in save.models]
    return [("", [{key: tensor for key, tensor in module if 0 not in tensor.shape} for module in modules])]  # ZeRO 3's


def _optimizer_weights(save: _Save) -> tuple[dict[str, Stages], tuple[str, ...]]:
    """The float32 weights ("") and Adam's moments, and notes; empty if the files do not name them."""
    if not save.partitions:
        if save.state.get("param_shapes"):
            return {}, ("no *_optim_states.pt, which hold the float32 weights: those of the model files are taken",)
        if fields(save.state.get("optimizer")).keys() & _UNNAMED:
            return {}, ("without ZeRO the float32 weights have no names: those of the model files are taken",)
        return {}, ()
    ranks = []
    for states, row in zip(save.models, save.partitions, strict=True):
        if not (shapes := _param_shapes(states[0])) or not row[0].masters:
            return {}, ("the optimizer files do not name the float32 weights: those of the model files are taken",)
        check_distinct(partition.masters[0] for partition in row)
        ranks.append(cut(row, shapes))
    shards = save.tensor_ranks
    weights: dict[str, Stages] = {
        kind: [
            (f"pipeline stage {stage}", [rank[kind] for rank in ranks[stage * shards : (stage + 1) * shards]])
            for stage in range(save.pipeline)
        ]
        for kind in ranks[0]
    }
    return weights, () if len(weights) > 1 else ("the optimizer has no moments of Adam",)


def _is_conv1d(stages: Stages, names: Mapping[str, Name]) -> bool:
    """Whether the matrices are [in, out]: their output has the length of the bias."""
    for _, ranks in stages:
        tensors = {names[key].ours(): tensor for key, tensor in ranks[0].items() if key in names}
        for name, weight in tensors.items():
            bias = tensors.get(name.removesuffix("weight") + "bias")
            leaf = leaf_of(name)
            if leaf.conv1d and leaf.split == 0 and bias and weight.shape[0] != weight.shape[-1]:
                return weight.shape[-1] == bias.shape[0]
    return True


def _join(stages: Stages, names: Mapping[str, Name], conv1d: bool) -> dict[str, Sharded]:
    """The model's tensors from those of every stage and tensor rank. Raises CheckpointError if they do not fit."""
    joined: list[tuple[str, dict[str, Sharded]]] = []
    for stage, ranks in stages:
        renamed = [{names[key].ours(): rank[key] for key in rank if key in names} for rank in ranks]
        if any("wpe.weight" in tensors for _, tensors in joined):
            for rank in renamed:
                rank.pop("wpe.weight", None)  # tied with its module, and not used in the last stage
        joined.append((stage, join_ranks(renamed, conv1d)))
    return join_stages(joined)


def _read_recorded(folder: Path, state: State, options: Options, megatron: bool) -> tuple[Recorded, Tokenizer | None]:
    """The recorded settings, and the tokenizer of transformers' Trainer, which writes a config.json."""
    if megatron:
        recorded = read_args(fields(state.get("args")), options)
        tokens = number_in(fields(state.get("universal_checkpoint_info")).get("original_vocab_size"))
        return replace(recorded, vocab_size=recorded.vocab_size or tokens), None
    for place in (folder, folder.resolve().parent):
        if (place / CONFIG).is_file():
            return recorded_in(read_raw_config(place), options), read_tokenizer(place)
    return read_args({}, options), None


def _progress(folder: Path, state: State) -> tuple[int | None, int | None]:
    """Iterations and consumed samples, None where they are not recorded."""
    iteration = iteration_of(folder, number_in(state.get("iteration"), state.get("global_steps")))
    if iteration is None and (number := re.search(r"\d+$", folder.name)):
        iteration = int(number[0])
    samples = state.get("consumed_train_samples"), fields(state.get("args")).get("consumed_train_samples")
    return iteration, number_in(*samples, state.get("global_samples"))  # the last: steps x global batch size
