"""DeepSpeed's universal checkpoints: every parameter merged in a folder of its own, float32.

zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt    {param, cat_dim, …}; written from ZeRO 3 the bare flat tensor
zero/<parameter>/step.pt                         Adam's steps, if the optimizer counts them per parameter
zero/optimizer_state.pt                          the options of the groups
mp_rank_MM_model_states.pt (ZeRO 3: zero_pp_rank_D_mp_rank_MM_…)    copied: arguments, progress, shapes
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from convert.files.inert import fields, load_inert
from convert.files.stored import Stored, StoredPieces
from convert.sources.agreement import check_agreement
from convert.sources.deepspeed import is_conv1d, join, module_ranks, refuse_automatic_tensor_parallelism
from convert.sources.deepspeed_files import State, load_models, model_grid, naming
from convert.sources.deepspeed_model import progress, read_recorded
from convert.sources.deepspeed_names import aliases, module_of, parse_key, qkv_order, translate
from convert.sources.options import Options
from convert.sources.ranks import file_error
from convert.sources.source import MOMENTS, Source
from convert.sources.zero_optimizer import is_stored, number_in, step_of

_CURE = "copy the whole folder, or convert the checkpoint again"


@dataclass
class _Files:
    """The tensors of zero/ by parameter, opened."""

    weights: dict[str, Stored]
    moments: dict[str, dict[str, Stored]]
    step: int | None
    files: list[Path]


def matches(folder: Path) -> bool:
    """Whether the folder has zero/ with a folder per parameter."""
    zero = folder / "zero"
    return zero.is_dir() and any((path / "fp32.pt").is_file() for path in zero.iterdir())


def open_folder(folder: Path, options: Options) -> Source:
    """The checkpoint in a universal folder. Raises CheckpointError with one line that names the file and the cure."""
    with naming(folder):
        return _open(folder, options)


def _open(folder: Path, options: Options) -> Source:
    model_files = model_grid(folder)
    if not model_files:
        raise file_error(folder / "mp_rank_00_model_states.pt", f"missing; {_CURE}")
    models = load_models(model_files)
    state = models[0][0]
    refuse_automatic_tensor_parallelism(state)
    second_names = aliases(model for row in models for model in row)
    found = _load(folder / "zero", _shapes(models), second_names)
    _check_positions(models, found.weights)
    names = translate(found.weights, second_names)
    stages = [("", [found.weights])]
    conv1d = names.family == "transformers" and is_conv1d(names, stages)
    recorded = read_recorded(folder, state, names, options)
    tensors = join(stages, names, conv1d, recorded.vocab_size)
    model, notes = recorded.describe(tensors, conv1d, 1)
    # keys that the 16-bit weights alone have (buffers, frozen weights of other tensor ranks) are not compared
    modules = [{key: tensor for key, tensor in rank.items() if key in names.ours} for rank in module_ranks(models)]
    check_agreement(
        join([("", modules)], names, conv1d, recorded.vocab_size),
        tensors,
        "give the checkpoint that was converted: DeepSpeed mixes up weights of runs with round_robin_gradients",
    )
    moments = {kind: join([("", [flat])], names, conv1d, None) for kind, flat in found.moments.items()}
    complete = all(moment.keys() == tensors.keys() for moment in moments.values())
    iteration, samples = progress(folder, state)
    version = state.get("ds_version")
    shards = _tensor_ranks(models, found.weights, recorded.args.tensor)
    return Source(
        path=folder,
        layout=", ".join(
            [
                f"DeepSpeed {version}" if version else "DeepSpeed",
                f"universal, {len(found.weights)} parameters",
                f"names of {'Megatron' if names.family == 'megatron' else 'transformers'}",
                "float32 masters",
            ]
        ),
        model=model,
        qkv=qkv_order(names, state, fields(state.get("args")), options, shards),
        tensors=tensors,
        files=(*(path for row in model_files for path in row), *found.files),
        conv1d=conv1d,
        iteration=iteration,
        consumed_samples=samples,
        notes=notes if complete else (*notes, "some weights have no moments of Adam: all are left"),
        moments=moments if complete else {},
        step=found.step if complete else None,
        tokenizer=recorded.tokenizer,
        facts={"deepspeed": version, "tensor_ranks": shards},
    )


def _load(zero: Path, shapes: Mapping[str, tuple[int, ...]], second_names: Mapping[str, str]) -> _Files:
    """Open every file of every weight. Raises CheckpointError naming one that is missing or of another step."""
    found = _Files({}, {kind: {} for kind in MOMENTS}, None, [])
    folders = {path.name: path for path in sorted(zero.iterdir()) if path.is_dir()}
    for key in (*folders, *(key for key in shapes if key not in folders)):
        try:
            if parse_key(key) is None or key in second_names:
                continue
        except KeyError:
            raise file_error(
                zero / key, "an unknown tensor: the model is no GPT-2, or its names are not known"
            ) from None
        path = zero / key / "fp32.pt"
        if not path.is_file():
            raise file_error(path, f"missing; {_CURE}")
        found.weights[key] = _tensor(path, shapes.get(key))
        found.files.append(path)
        for kind, moments in found.moments.items():
            if (path := zero / key / f"{kind}.pt").is_file():
                moments[key] = _tensor(path, found.weights[key].shape)
                found.files.append(path)
        if (path := zero / key / "step.pt").is_file():
            step = number_in(load_inert(path))
            if found.step not in (None, step):
                raise file_error(path, f"is of step {step}, but the other parameters are of {found.step}; {_CURE}")
            found.step = step
            found.files.append(path)
    path = zero / "optimizer_state.pt"
    if found.step is None and path.is_file():
        options = fields(load_inert(path))
        states = fields(options.get("optimizer_state_dict"))  # written from ZeRO 3
        found.step = step_of(options, options, list(fields(states.get("state")).values()))
        found.files.append(path)
    return found


def _tensor(path: Path, shape: tuple[int, ...] | None) -> Stored:
    """The tensor in a file; `shape` is that of the parameter, which a flat one gets."""
    content = load_inert(path)
    inside = fields(content)
    if "sub_param_shape" in inside or inside.get("param_n_sub_params", 1) != 1:
        raise file_error(path, "is merged from several parameters (gated or grouped ones): the model is no GPT-2")
    tensor: Stored = inside.get("param", content)
    if not is_stored(tensor):
        raise file_error(path, f"has no tensor under param; {_CURE}")
    if shape and len(shape) > 1 == len(tensor.shape):
        if math.prod(shape) != tensor.shape[0]:
            raise file_error(path, f"has {tensor.shape[0]} elements, the parameter has {list(shape)}; {_CURE}")
        return StoredPieces(shape, (tensor,))
    if len(tensor.shape) == 0:
        raise file_error(path, f"has no dimensions; {_CURE}")
    return tensor


def _check_positions(models: Sequence[Sequence[State]], keys: Iterable[str]) -> None:
    """The last stage of a pipeline has position embeddings that it does not train; the conversion may have taken them.

    It takes the first stage's only if the model lists the parameter among those that several stages have.
    """
    info = fields(models[0][0].get("universal_checkpoint_info"))
    listed = " ".join(map(str, info.get("pipeline_replicated_parameter_patterns") or ()))
    for key in keys:
        if key.endswith("position_embeddings.weight") and "position_embeddings" not in listed:
            stages = {frozenset(shapes) for row in models if key in (shapes := _shapes([row]))}
            if len(stages) > 1:
                raise CheckpointError(
                    f"zero/{key} may be the unused copy of the last pipeline stage, because no "
                    "pipeline_replicated_parameter_patterns were recorded; give the checkpoint that was converted"
                )


def _shapes(models: Sequence[Sequence[State]]) -> dict[str, tuple[int, ...]]:
    """The parameters that the optimizer had, with their shapes on one tensor rank."""
    return {
        key: tuple(shape)
        for row in models
        for group in row[0].get("param_shapes") or ()
        for key, shape in fields(group).items()
    }


def _tensor_ranks(models: Sequence[Sequence[State]], keys: Mapping[str, Any], recorded: int | None) -> int:
    """The tensor ranks that wrote the checkpoint, which decide the order of the qkv rows of version 0."""
    ranks = number_in(fields(models[0][0].get("checkpoint_parallel_dimensions")).get("tp_degree")) or recorded
    if ranks is None:  # without a pipeline, each model file is of one
        ranks = 1 if any(module_of(key) is not None for key in keys) else len(models)
    return ranks
