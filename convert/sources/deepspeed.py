"""DeepSpeed's checkpoints: ZeRO 0 to 3, tensor ranks, pipelines; names of transformers or Megatron.

The float32 weights of the optimizer files are preferred over the 16-bit weights of the model files.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from common.errors import CheckpointError
from common.tokenizer import Tokenizer
from convert.arguments import Options
from convert.megatron_args import read_args
from convert.pt import fields, number_in
from convert.sources.consistency import CURE, check_agreement, check_distinct, iteration_of
from convert.sources.deepspeed_save import PATTERNS, Save, State, open_save, param_shapes, tensors_in
from convert.sources.huggingface import recorded_in
from convert.sources.names import Name, translate
from convert.sources.ranks import architecture, join_ranks, join_stages, qkv_order, tie_head
from convert.sources.source import Recorded, Sharded, Source
from convert.sources.zero import cut
from training.huggingface.config import CONFIG, read_raw_config
from training.huggingface.tokenizer import read_tokenizer
from training.moments import ADAMW
from training.tensors import leaf_of

Stages = Sequence[tuple[str, Sequence[Mapping[str, Sharded]]]]
"""Stages of a pipeline (or its modules): a name, and the tensors of each tensor rank by key."""
_2019 = re.compile(r"(?:module\.)*transformer\.layers\.\d+\.attention\.query_key_value\.weight")
_UNNAMED = {"fp32_groups", "fp32_groups_flat"}  # the float32 weights of a training without ZeRO


def matches(folder: Path) -> bool:
    """Whether the folder has a file with one of DeepSpeed's names."""
    return any(pattern.fullmatch(path.name) for path in folder.iterdir() for pattern in PATTERNS)


def open_folder(folder: Path, options: Options) -> Source:
    """The checkpoint in a tag's folder. Raises CheckpointError naming the file and the cure."""
    save = open_save(folder)
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
            f"{frozen} tensors were not trained and have no float32 weights; the model files' weights are used",
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


def _model_weights(save: Save) -> Stages:
    """The weights in model and layer files: 16-bit, or all of a run without float32 weights."""
    if save.layers:
        return [
            (f"layer_{number:02d}", [{f"{number}.{key}": tensor for key, tensor in rank.items()} for rank in ranks])
            for number, ranks in save.layers.items()
        ]
    modules = [tensors_in(states[0].get("module")) for states in save.models]
    return [("", [{key: tensor for key, tensor in module if 0 not in tensor.shape} for module in modules])]  # ZeRO 3's


def _optimizer_weights(save: Save) -> tuple[dict[str, Stages], tuple[str, ...]]:
    """The float32 weights ("") and Adam's moments, empty if they have no names, and notes."""
    if not save.partitions:
        if save.state.get("param_shapes"):
            return {}, ("no *_optim_states.pt, which hold the float32 weights: the model files' weights are used",)
        if fields(save.state.get("optimizer")).keys() & _UNNAMED:
            return {}, ("without ZeRO the float32 weights have no names: the model files' weights are used",)
        return {}, ()
    ranks = []
    for states, row in zip(save.models, save.partitions, strict=True):
        if not (shapes := param_shapes(states[0])) or not row[0].masters:
            return {}, ("the optimizer files do not name the float32 weights: the model files' weights are used",)
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
    """The model's tensors, joined over tensor ranks and stages."""
    joined: list[tuple[str, dict[str, Sharded]]] = []
    for stage, ranks in stages:
        renamed = [{names[key].ours(): rank[key] for key in rank if key in names} for rank in ranks]
        if any("wpe.weight" in tensors for _, tensors in joined):
            for rank in renamed:
                rank.pop("wpe.weight", None)  # tied with its module, and not used in the last stage
        joined.append((stage, join_ranks(renamed, conv1d)))
    return join_stages(joined)


def _read_recorded(folder: Path, state: State, options: Options, megatron: bool) -> tuple[Recorded, Tokenizer | None]:
    """The recorded settings, and the tokenizer, which transformers' Trainer writes."""
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
