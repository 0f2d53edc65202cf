"""DeepSpeed's universal checkpoints: every parameter merged in a folder of its own, float32.

zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt    {param, cat_dim, …}; written from ZeRO 3 the bare flat tensor
zero/<parameter>/step.pt                         Adam's steps, if the optimizer counts them per parameter
zero/optimizer_state.pt                          the options of the groups
mp_rank_MM_model_states.pt (ZeRO 3: zero_pp_rank_D_mp_rank_MM_…)    copied: arguments, progress, shapes
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.errors import CheckpointError
from convert.arguments import Options
from convert.megatron_args import number
from convert.pt import fields, load_pt
from convert.sources.consistency import check_alike, file_error
from convert.sources.deepspeed import module_weights, param_shapes, read_models
from convert.sources.deepspeed_model import State, build, module_of, parse_key, second_names
from convert.sources.source import MOMENTS, Source
from convert.sources.zero import number_in, step_of
from convert.stored import Stored, StoredPieces, StoredTensor

_CURE = "copy the whole folder, or convert the checkpoint again"


def matches(folder: Path) -> bool:
    """Whether the folder has zero/ with a folder per parameter."""
    zero = folder / "zero"
    return zero.is_dir() and any((path / "fp32.pt").is_file() for path in zero.iterdir())


def open_folder(folder: Path, options: Options) -> Source:
    """The checkpoint in a universal folder. Raises CheckpointError with one line that names the file and the cure."""
    model_files, models = read_models(folder)
    if not model_files:
        raise file_error(folder / "mp_rank_00_model_states.pt", f"missing; {_CURE}")
    state, zero = models[0][0], folder / "zero"
    shapes = {key: shape for row in models for group in param_shapes(row[0]) for key, shape in group.items()}
    folders = (path.name for path in sorted(zero.iterdir()) if path.is_dir())
    keys = [key for key in dict.fromkeys((*folders, *shapes)) if parse_key(key) and key not in second_names(state)]
    _check_positions(models, keys)
    weights = {key: _tensor(zero / key / "fp32.pt", shapes.get(key)) for key in keys}
    moments = {
        kind: {key: _tensor(path, weights[key].shape) for key in keys if (path := zero / key / f"{kind}.pt").is_file()}
        for kind in MOMENTS
    }
    files = [path for key in keys for path in sorted((zero / key).glob("*.pt"))]
    shards = _tensor_ranks(models, keys)
    return build(
        folder,
        options,
        state,
        [("", [{key: value for key, value in rank.items() if key in weights} for rank in module_weights(models)])],
        {kind: [("", [tensors])] for kind, tensors in ({"": weights} | moments).items()},
        layout=f"universal, {len(weights)} parameters",
        shards=shards,
        files=[*(path for row in model_files for path in row), *files],
        version=state.get("ds_version"),
        step=_step(zero, keys),
        notes=(),
        facts={"tensor_ranks": shards},
        cure="give the checkpoint that was converted: DeepSpeed mixes up weights of runs with round_robin_gradients",
    )


def _tensor(path: Path, shape: tuple[int, ...] | None) -> Stored:
    """The tensor in a file; `shape` is that of the parameter, which a flat one gets."""
    if not path.is_file():
        raise file_error(path, f"missing; {_CURE}")
    content = load_pt(path)
    inside = fields(content)
    if "sub_param_shape" in inside or inside.get("param_n_sub_params", 1) != 1:
        raise file_error(path, "is merged from several parameters (gated or grouped ones): the model is no GPT-2")
    tensor = inside.get("param", content)
    if not isinstance(tensor, StoredTensor) or not tensor.shape:
        raise file_error(path, f"has no tensor under param; {_CURE}")
    if shape and len(shape) > 1 == len(tensor.shape):
        if math.prod(shape) != tensor.shape[0]:
            raise file_error(path, f"has {tensor.shape[0]} elements, the parameter has {list(shape)}; {_CURE}")
        return StoredPieces(shape, (tensor,))
    return tensor


def _step(zero: Path, keys: Iterable[str]) -> int | None:
    """Adam's steps. Raises CheckpointError if the parameters are of different ones."""
    steps = [(path, {"step": number_in(load_pt(path))}) for key in keys if (path := zero / key / "step.pt").is_file()]
    check_alike(steps)
    if steps or not (zero / "optimizer_state.pt").is_file():
        return steps[0][1]["step"] if steps else None
    options = fields(load_pt(zero / "optimizer_state.pt"))
    states = fields(fields(options.get("optimizer_state_dict")).get("state"))  # written from ZeRO 3
    return step_of(options, options, list(states.values()))


def _check_positions(models: Sequence[Sequence[State]], keys: Iterable[str]) -> None:
    """The last stage of a pipeline has position embeddings that it does not train; the conversion may have taken them.

    It takes the first stage's only if the model lists the parameter among those that several stages have.
    """
    info = fields(models[0][0].get("universal_checkpoint_info"))
    listed = " ".join(map(str, info.get("pipeline_replicated_parameter_patterns") or ()))
    for key in keys:
        if key.endswith("position_embeddings.weight") and "position_embeddings" not in listed:
            holders = [[key for group in param_shapes(row[0]) for key in group] for row in models]
            if len({tuple(names) for names in holders if key in names}) > 1:
                raise CheckpointError(
                    f"zero/{key} may be the unused copy of the last pipeline stage, because no "
                    "pipeline_replicated_parameter_patterns were recorded; give the checkpoint that was converted"
                )


def _tensor_ranks(models: Sequence[Sequence[State]], keys: Iterable[str]) -> int:
    """The tensor ranks that wrote the checkpoint, which decide the order of the qkv rows of version 0."""
    state = models[0][0]
    ranks = number_in(fields(state.get("checkpoint_parallel_dimensions")).get("tp_degree"))
    ranks = ranks or number(fields(state.get("args")), "tensor_model_parallel_size", "model_parallel_size")
    # without a pipeline, each model file is of one
    return ranks or (1 if any(module_of(key) is not None for key in keys) else len(models))
