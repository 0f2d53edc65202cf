"""The files of a DeepSpeed tag: found, opened without tensor data, and checked to be of one save.

    mp_rank_MM_model_states.pt                          ZeRO 0 to 2, one per model-parallel rank
    zero_pp_rank_D_mp_rank_MM_model_states.pt           ZeRO 3, with empty weights
    [bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt    ZeRO 1 to 3, a partition of the float32 weights
    layer_LL[-model_TT]-model_states.pt                 pipeline modules, one per layer and tensor rank TT

D is the data rank. MM is the tensor rank; in a pipeline, stage x tensor ranks + tensor rank.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from convert.files.inert import fields, load_inert
from convert.files.stored import Stored
from convert.sources.ranks import file_error
from convert.sources.zero_optimizer import Partition, is_stored, number_in, read_partition

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<data>\d+)_)?mp_rank_(?P<rank>\d+)_model_states\.pt")
# before March 2021 without the underscore before optim
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<rank>\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<rank>\d+)(?:-model_(?P<data>\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_.*|expp_rank_.*")
_SAME = ("ds_version", "global_steps", "iteration", "dp_world_size", "mp_world_size")  # in all model files of a save
_CURE = "copy every file of the save"

State = Mapping[str, Any]


@dataclass(frozen=True)
class Tag:
    """The files of one save; the lists are by model-parallel rank, then by data rank."""

    models: Sequence[Sequence[State]]
    """The content of the model files; of one data rank below ZeRO 3. Empty if there are layer files alone."""
    partitions: Sequence[Sequence[Partition]]
    """Empty if there are no optimizer files."""
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


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Every error inside becomes a CheckpointError of one line that names the folder or a file."""
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith((str(folder), str(folder.resolve().parent))):
            raise
        raise file_error(folder, error) from None
    except OSError as error:
        raise file_error(
            Path(error.filename or folder), f"cannot be read ({error.strerror or error}); {_CURE}"
        ) from None
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # a value of another type than DeepSpeed writes
        problem = (str(error).splitlines() or [""])[0][:150]
        raise file_error(folder, f"has content that is not DeepSpeed's ({problem}); {_CURE} again") from None


def matches(folder: Path) -> bool:
    """Whether the folder has a file with one of DeepSpeed's names."""
    return any(pattern.fullmatch(path.name) for path in folder.iterdir() for pattern in (_MODEL, _OPTIMIZER, _LAYER))


def load_tag(folder: Path) -> Tag:
    """Open every file. Raises CheckpointError naming one that is missing, damaged or of another save."""
    if expert := next((path for path in sorted(folder.iterdir()) if _EXPERT.fullmatch(path.name)), None):
        raise file_error(expert, "weights of an expert: a mixture of experts is no GPT-2")
    model_files, optimizer_files, layer_files = (_grid(folder, kind) for kind in (_MODEL, _OPTIMIZER, _LAYER))
    if not model_files and not layer_files:
        raise file_error(folder / "mp_rank_00_model_states.pt", f"missing; {_CURE}")
    stage3 = bool(model_files) and _MODEL.fullmatch(model_files[0][0].name)["data"] is not None  # type: ignore[index]
    models = load_models(model_files)
    partitions = [[read_partition(path) for path in row] for row in optimizer_files]
    if partitions:
        _check_partitions(partitions, models[0][0].get("ds_version") if models else None)
        _check_counts(model_files, optimizer_files, stage3)
    layers = {}
    for row in layer_files:
        number = int(_LAYER.fullmatch(row[0].name)["rank"])  # type: ignore[index]
        layers[number] = [tensors_of(_open(path)) for path in row]
    if layers and len(models) % len(layer_files[0]):
        raise file_error(
            folder,
            f"{len(models)} mp_rank files, no multiple of the {len(layer_files[0])} ranks of layer files; {_CURE}",
        )
    return Tag(
        models=models,
        partitions=partitions,
        layers=layers,
        files=[path for row in (*model_files, *optimizer_files, *layer_files) for path in row],
        stage=partitions[0][0].stage if partitions else 3 if stage3 else 0,
    )


def model_grid(folder: Path) -> list[list[Path]]:
    """The model files of a folder, by model-parallel rank, then by data rank."""
    return _grid(folder, _MODEL)


def load_models(files: Sequence[Sequence[Path]]) -> list[list[State]]:
    """The content of the model files. Raises CheckpointError unless they are all those of one save."""
    models = [[_open(path) for path in row] for row in files]
    for row, states in zip(files, models, strict=True):
        for path, state in zip(row, states, strict=True):
            if "module" not in state:
                raise file_error(path, "has no module: not a model file of DeepSpeed; copy it again from the run")
            for key in _SAME:
                found, expected = (_plain(content.get(key)) for content in (state, models[0][0]))
                if found != expected:
                    raise file_error(
                        path, f"{key} is {found!r}, but {expected!r} in {files[0][0].name}; {_CURE}, and of no other"
                    )
    ranks = number_in(models[0][0].get("mp_world_size")) if models else None
    if ranks is not None and ranks > len(files):
        raise file_error(_sibling(files[0][0], _MODEL, len(files), 0), f"missing of {ranks} mp_rank files; {_CURE}")
    if ranks is not None and ranks < len(files):
        raise file_error(
            files[ranks][0], f"the save has {ranks} model-parallel ranks; remove this file of another save"
        )
    return models


def tensors_of(value: Any, prefix: str = "") -> dict[str, Stored]:
    """The tensors of a state dict by key; nested dicts (Megatron's) are joined with dots, other values are left out."""
    found: dict[str, Stored] = {}
    for key, item in value.items() if isinstance(value, Mapping) else ():
        if is_stored(item):
            found[f"{prefix}{key}"] = item
        else:
            found |= tensors_of(item, f"{prefix}{key}.")
    return found


def _grid(folder: Path, pattern: re.Pattern[str]) -> list[list[Path]]:
    """The files of one kind, by rank (or layer), then by data (or tensor) rank; none may be missing or twice there."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.iterdir()):
        if match := pattern.fullmatch(path.name):
            place = int(match["rank"]), int(match["data"] or 0)
            if place in found:
                raise file_error(path, f"is of the same rank as {found[place].name}; remove the file of the other save")
            found[place] = path
    if not found:
        return []
    example = next(iter(found.values()))
    ranks, columns = sorted({rank for rank, _ in found}), 1 + max(data for _, data in found)
    for rank in ranks if pattern is _LAYER else range(ranks[-1] + 1):
        for data in range(columns):
            if (rank, data) not in found:
                raise file_error(_sibling(example, pattern, rank, data), f"missing; {_CURE}")
    return [[found[rank, data] for data in range(columns)] for rank in ranks]


def _sibling(path: Path, pattern: re.Pattern[str], rank: int, data: int) -> Path:
    """The file of another rank."""
    match, name = pattern.fullmatch(path.name), path.name
    assert match is not None
    for key, number in sorted({"rank": rank, "data": data}.items(), key=lambda item: -match.start(item[0])):
        start, end = match.span(key)
        name = name if start < 0 else f"{name[:start]}{number:0{end - start}d}{name[end:]}"
    return path.with_name(name)


def _check_counts(models: Sequence[Sequence[Path]], optimizers: Sequence[Sequence[Path]], stage3: bool) -> None:
    if not models:
        raise file_error(optimizers[0][0].with_name("mp_rank_00_model_states.pt"), f"missing; {_CURE}")
    if len(models) != len(optimizers):
        path, kind = (models, "optimizer") if len(models) > len(optimizers) else (optimizers, "model")
        raise file_error(path[min(len(models), len(optimizers))][0], f"the {kind} file of its rank is missing; {_CURE}")
    if stage3 and len(models[0]) != len(optimizers[0]):
        path, kind = (models, "optimizer") if len(models[0]) > len(optimizers[0]) else (optimizers, "model")
        raise file_error(
            path[0][min(len(models[0]), len(optimizers[0]))], f"the {kind} file of its rank is missing; {_CURE}"
        )


def _check_partitions(rows: Sequence[Sequence[Partition]], version: Any) -> None:
    first = rows[0][0]
    if isinstance(version, str) and first.version not in (None, version):
        raise file_error(
            first.path, f"ds_version is {first.version}, but {version} in the model files; {_CURE}, and of no other"
        )
    if first.ranks is not None and first.ranks > len(rows[0]):
        absent = _sibling(first.path, _OPTIMIZER, 0, len(rows[0]))
        raise file_error(absent, f"missing of {first.ranks} data ranks; {_CURE}")
    if first.ranks is not None and first.ranks < len(rows[0]):
        raise file_error(
            rows[0][first.ranks].path, f"the save has {first.ranks} data ranks; remove this file of another save"
        )
    for partition in (partition for row in rows for partition in row):
        for what, found, expected in (
            ("ZeRO stage", partition.stage, first.stage),
            ("partition_count", partition.ranks, first.ranks),
            ("ds_version", partition.version, first.version),
            ("step of the optimizer", partition.step, first.step),
            ("number of groups", len(partition.masters), len(first.masters)),
            ("type of the weights", _types(partition), _types(first)),
        ):
            if found != expected:
                raise file_error(
                    partition.path,
                    f"the {what} is {found}, but {expected} in {first.path.name}; {_CURE}, and of no other",
                )


def _types(partition: Partition) -> str:
    return " and ".join(sorted({str(tensor.dtype) for tensor in partition.masters}))


def _open(path: Path) -> State:
    state = fields(load_inert(path))
    if not state:
        raise file_error(path, "holds no dict of values; copy it again from the run")
    return state


def _plain(value: Any) -> Any:
    return number_in(value) if is_stored(value) else value
