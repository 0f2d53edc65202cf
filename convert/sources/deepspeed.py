"""DeepSpeed's checkpoints of GPT-2: ZeRO 0 to 3, tensor ranks, pipeline modules; names of transformers or of Megatron.

The float32 weights of the optimizer files are preferred over the 16-bit weights of the model files.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from common.errors import CheckpointError
from convert.files.inert import fields
from convert.files.stored import Stored
from convert.sources.agreement import check_agreement, check_distinct
from convert.sources.deepspeed_files import State, Tag, load_tag, naming, tensors_of
from convert.sources.deepspeed_files import matches as matches
from convert.sources.deepspeed_model import progress, read_recorded
from convert.sources.deepspeed_names import Names, aliases, module_of, qkv_order, translate
from convert.sources.options import Options
from convert.sources.ranks import GPT2_VOCABULARY, file_error, join_ranks, join_stages
from convert.sources.source import Sharded, Source, whole
from convert.sources.zero import join_fragments
from convert.sources.zero_optimizer import cut

Stages = Sequence[tuple[str, Sequence[Mapping[str, Stored]]]]
"""Stages of a pipeline (or its modules): a name, and the tensors of each tensor rank by key."""


def open_folder(folder: Path, options: Options) -> Source:
    """The checkpoint in a tag's folder. Raises CheckpointError with one line that names the file and the cure."""
    with naming(folder):
        return _open(folder, options)


def _open(folder: Path, options: Options) -> Source:
    tag = load_tag(folder)
    state, shards = tag.state, tag.tensor_ranks
    refuse_automatic_tensor_parallelism(state)
    _check_layers(folder, tag)
    modules, (masters, moments, notes) = _model_weights(tag), _optimizer_weights(tag)
    if tag.stage == 3 and not masters:
        raise file_error(folder, "ZeRO 3 without float32 weights in *_optim_states.pt; copy every file of the save")
    names = translate(_keys([*modules, *masters]), aliases(model for row in tag.models for model in row))
    conv1d = names.family == "transformers" and is_conv1d(names, [*masters, *modules])
    recorded = read_recorded(folder, state, names, options)
    tensors = join(modules, names, conv1d, recorded.vocab_size)
    trained = join(masters, names, conv1d, recorded.vocab_size)
    for name, tensor in trained.items():
        if name in tensors and tensors[name].shape != tensor.shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(tensors[name].shape)} in the model files and {list(tensor.shape)} in "
                "the optimizer files; remove the files of the other save"
            )
    check_agreement(tensors, trained, "copy every file of the save; without *_optim_states.pt the latter are taken")
    tensors |= trained
    model, more_notes = recorded.describe(tensors, conv1d, shards)
    if trained and (frozen := len(tensors) - len(trained)):
        notes += (f"{frozen} tensors were not trained and have no float32 weights; those of the model files are taken",)
    joined_moments = {kind: join(stages, names, conv1d, recorded.vocab_size) for kind, stages in moments.items()}
    complete = joined_moments and all(found.keys() == tensors.keys() for found in joined_moments.values())
    iteration, samples = progress(folder, state)
    first = tag.partitions[0][0] if tag.partitions else None
    version = state.get("ds_version") or (first and first.version)
    stages = len(tag.models) // shards
    parts = [
        f"DeepSpeed {version}" if version else "DeepSpeed",
        _zero(tag),
        *([f"pipeline {stages} in {len(tag.layers)} layer files"] if tag.layers else []),
        f"tensor {shards}",
        f"names of {'Megatron' if names.family == 'megatron' else 'transformers'}",
        f"{' and '.join(sorted({_type(tensor) for tensor in tensors.values()}))} {'masters' if trained else 'weights'}",
    ]
    return Source(
        path=folder,
        layout=", ".join(parts),
        model=model,
        qkv=qkv_order(names, state, fields(state.get("args")), options, shards),
        tensors=tensors,
        files=tuple(tag.files),
        conv1d=conv1d,
        iteration=iteration,
        consumed_samples=samples,
        notes=(*notes, *more_notes),
        moments=joined_moments if complete else {},
        step=first.step if first and complete else None,
        tokenizer=recorded.tokenizer,
        facts={"deepspeed": version, "zero_stage": tag.stage, "tensor_ranks": shards, "pipeline_stages": stages},
    )


def refuse_automatic_tensor_parallelism(state: State) -> None:
    """DeepSpeed's AutoTP splits a model of transformers by rules that the file does not have."""
    ranks = fields(fields(state.get("ds_config")).get("tensor_parallel")).get("autotp_size")
    if isinstance(ranks, int) and ranks > 1:
        raise CheckpointError(
            f"split over {ranks} ranks by DeepSpeed's AutoTP, whose order of rows is not recorded; "
            "save it with engine.save_16bit_model, which joins the ranks"
        )


def is_conv1d(names: Names, stages: Stages) -> bool:
    """Whether the matrices are [in, out]: their output has the length of the bias."""
    for _, ranks in stages:
        tensors = {names.ours[key]: tensor for key, tensor in ranks[0].items() if key in names.ours}
        for name, weight in tensors.items():
            bias = tensors.get(name.removesuffix("weight") + "bias")
            if name.endswith((".c_attn.weight", ".c_fc.weight")) and bias and weight.shape[0] != weight.shape[-1]:
                return weight.shape[-1] == bias.shape[0]
    return True


def join(stages: Stages, names: Names, conv1d: bool, vocab_size: int | None) -> dict[str, Sharded]:
    """The model's tensors from those of every stage and tensor rank. Raises CheckpointError if they do not fit."""
    joined: list[tuple[str, dict[str, Sharded]]] = []
    for stage, ranks in stages:
        renamed = [_rename(rank, names) for rank in ranks]
        if any("wpe.weight" in tensors for _, tensors in joined):
            for rank in renamed:
                rank.pop("wpe.weight", None)  # tied with its module, and not used in the last stage
        tensors = join_ranks(renamed, conv1d)
        if names.family == "transformers" and len(ranks) > 1:
            tensors |= _copied_vocabulary(renamed, vocab_size)
        joined.append((stage, tensors))
    return join_stages(joined)


def _rename(tensors: Mapping[str, Stored], names: Names) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for key, tensor in tensors.items():
        if (name := names.ours.get(key)) is not None:
            if name in found:
                raise CheckpointError(f"tensor {name!r} is there twice, the second time as {key!r}")
            found[name] = tensor
    return found


def _copied_vocabulary(ranks: Sequence[Mapping[str, Stored]], vocab_size: int | None) -> dict[str, Sharded]:
    """Embeddings that every tensor rank has as a whole. Raises CheckpointError if the rows do not tell."""
    found = {}
    for name in {"wte.weight", "lm_head.weight"} & ranks[0].keys():
        rows = ranks[0][name].shape[0]
        if vocab_size is None and rows >= GPT2_VOCABULARY:
            raise CheckpointError(
                f"tensor {name!r} has {rows} rows on each of {len(ranks)} tensor ranks: a copy, or a part of a larger "
                "vocabulary; give --vocab-size"
            )
        if vocab_size is not None and rows >= vocab_size:
            first, *others = (whole(rank[name]) for rank in ranks)
            copies = {f"tensor rank {number}": other for number, other in enumerate(others, 1)}
            found[name] = Sharded(first.shape, first.blocks, copies)
    return found


def module_ranks(models: Sequence[Sequence[State]]) -> list[dict[str, Stored]]:
    """The tensors of the model files by key, one dict per model-parallel rank; ZeRO 3's are empty and left out."""
    return [
        {key: tensor for key, tensor in tensors_of(states[0]["module"]).items() if 0 not in tensor.shape}
        for states in models
    ]


def _model_weights(tag: Tag) -> Stages:
    """What the model files and the layer files hold: 16-bit weights, or all of a run without float32 weights."""
    if tag.layers:
        return [
            (f"layer_{number:02d}", [{f"{number}.{key}": tensor for key, tensor in rank.items()} for rank in ranks])
            for number, ranks in tag.layers.items()
        ]
    ranks = module_ranks(tag.models)
    for states, found in zip(tag.models, ranks, strict=True):
        for key, shape in fields(states[0].get("frozen_param_shapes")).items() if tag.stage == 3 else ():
            shares = [share for state in states if (share := fields(state.get("frozen_param_fragments")).get(key))]
            if len(shares) < len(states):
                raise CheckpointError(
                    f"tensor {key!r}: its share of a data rank is missing; copy every file of the save"
                )
            found[key] = join_fragments(tuple(shape), shares)
    return [("", ranks)]


def _optimizer_weights(tag: Tag) -> tuple[Stages, dict[str, Stages], tuple[str, ...]]:
    """The float32 weights and Adam's moments, and notes; empty if the files do not name them."""
    if not tag.partitions:
        if tag.state.get("param_shapes"):
            return [], {}, ("no *_optim_states.pt, which hold the float32 weights: those of the model files are taken",)
        if fields(tag.state.get("optimizer")).keys() & {"fp32_groups", "fp32_groups_flat"}:
            return [], {}, ("without ZeRO the float32 weights have no names: those of the model files are taken",)
        return [], {}, ()
    weights, moments = [], []
    for states, row in zip(tag.models, tag.partitions, strict=True):
        shapes = states[0].get("param_shapes") or row[0].shapes
        if not shapes or not row[0].masters:
            return [], {}, ("the optimizer files do not name the float32 weights: those of the model files are taken",)
        check_distinct(partition.masters[0] for partition in row)
        rank_weights, rank_moments = cut(row, shapes)
        weights.append(rank_weights)
        moments.append(rank_moments)
    kinds = moments[0].keys()
    return (
        _stages(weights, tag.tensor_ranks),
        {kind: _stages([rank[kind] for rank in moments], tag.tensor_ranks) for kind in kinds},
        () if kinds else ("the optimizer has no moments of Adam",),
    )


def _stages(ranks: Sequence[Mapping[str, Stored]], shards: int) -> Stages:
    return [
        (f"pipeline stage {start // shards}", ranks[start : start + shards]) for start in range(0, len(ranks), shards)
    ]


def _check_layers(folder: Path, tag: Tag) -> None:
    """Raises CheckpointError if the model files name a pipeline module whose file is missing."""
    for states in tag.models if tag.layers else ():
        for group in states[0].get("param_shapes") or ():
            for key in group:
                if (number := module_of(key)) is not None and number not in tag.layers:
                    raise file_error(
                        folder / f"layer_{number:02d}-model_00-model_states.pt", "missing; copy every file of the save"
                    )


def _keys(stages: Stages) -> Iterable[str]:
    return dict.fromkeys(key for _, ranks in stages for rank in ranks for key in rank)


def _zero(tag: Tag) -> str:
    if tag.partitions:
        return f"ZeRO {tag.stage} over {len(tag.partitions[0])} data ranks"
    return "ZeRO without its optimizer files" if tag.state.get("param_shapes") else "ZeRO 0"


def _type(tensor: Sharded) -> str:
    return str(tensor.blocks[0].tensor.dtype).removeprefix("torch.")
