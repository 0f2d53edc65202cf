"""The files of Megatron-LM's `mp_rank_*` checkpoints, from the 2019 fork to today: one per tensor and pipeline rank.

    iter_0000100/mp_rank_TT/model_optim_rng.pt          PP 1
    iter_0000100/mp_rank_TT_PPP/model_optim_rng.pt      PP 2 and more

`model_rng.pt` if the distributed optimizer of 2022 wrote it; its own files are `mp_rank_…_DDD/optim.pt`, later
`distrib_optim.pt`, and are not read. A file has `model`, or with an interleaved pipeline `model0`, `model1`, ….
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.files.inert import fields, load_inert
from convert.files.stored import LoadedTensor, Stored, StoredTensor
from convert.sources.names import COPY_OF_WTE, Name, parse
from convert.sources.ranks import file_error

NEWEST_VERSION = 3
FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
"""Tensor rank, pipeline stage, and the rank of experts or of the distributed optimizer."""
_MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
_NO_GPT2 = "no GPT-2, and nothing else is converted"


@dataclass(frozen=True)
class Chunk:
    """The tensors of one `model`: of a stage, or of a part of it if the pipeline is interleaved."""

    tensors: Mapping[Name, Stored]
    head: Mapping[str, Stored]
    """The last stage's copy of the token embedding, as `wte.weight`; empty elsewhere."""

    def layers(self) -> list[int]:
        """The numbers that its layers have, sorted."""
        return sorted({name.layer for name in self.tensors if name.layer is not None})

    def renamed(self, first_layer: int) -> dict[str, Stored]:
        """The tensors by our names, with the chunk's layer 0 as layer `first_layer` of the model."""
        return {name.ours(first_layer): tensor for name, tensor in self.tensors.items()}


@dataclass(frozen=True)
class RankFile:
    """What is in one rank's file; no tensor has been read."""

    path: Path
    chunks: tuple[Chunk, ...]
    names: str
    """The age of its tensors' names, for people."""
    version: float | None
    iteration: int | None
    args: Mapping[str, Any]
    has_optimizer: bool


def find_files(folder: Path) -> tuple[dict[tuple[int, int], Path], str]:
    """Every rank's file by (stage, tensor rank), and the format of the folders' names.

    Raises CheckpointError if a rank lacks its file, or is missing before the last one.
    """
    found: dict[tuple[int, int], Path] = {}
    forms: dict[str, Path] = {}
    for child in sorted(folder.iterdir()):
        match = FOLDER.fullmatch(child.name)
        if not match or not child.is_dir():
            continue
        files = [child / name for name in _MODEL_FILES if (child / name).is_file()]
        if not files and (child / "optim.pt").is_file():
            continue  # a data-parallel rank's part of the distributed optimizer
        if not files:
            raise file_error(child, f"{_MODEL_FILES[0]} is missing")
        if len(files) > 1:
            raise file_error(child, f"has {' and '.join(_MODEL_FILES)}; move the one that does not belong away")
        if match[3]:
            raise file_error(child, f"ranks of experts: {_NO_GPT2}")
        forms.setdefault("mp_rank_{:02d}" if match[2] is None else "mp_rank_{:02d}_{:03d}", child)
        position = (int(match[2] or 0), int(match[1]))
        if position in found or len(forms) > 1:
            other = found[position].parent if position in found else next(iter(forms.values()))
            raise file_error(other, f"and {child.name} are of two checkpoints; move one away")
        found[position] = files[0]
    if not found:
        raise file_error(folder, f"no mp_rank_*/{_MODEL_FILES[0]}")
    form = next(iter(forms))
    stages, ranks = (max(position) + 1 for position in zip(*found, strict=True))
    for stage in range(stages):
        for rank in range(ranks):
            if (stage, rank) not in found:
                raise file_error(folder / form.format(rank, stage), "is missing, but ranks after it are there")
    return found, form


def read_file(path: Path) -> RankFile:
    """Raise CheckpointError naming the file if it is damaged, holds no model or an unknown tensor."""
    content = load_inert(path)
    if not isinstance(content, Mapping):
        raise file_error(path, "not a checkpoint of Megatron-LM (no `model` in it)")
    models = [key for key in content if isinstance(key, str) and re.fullmatch(r"model\d*", key)]
    expected = ["model"] if "model" in models else [f"model{number}" for number in range(len(models))]
    if not models or set(models) != set(expected):
        found = ", ".join(sorted(models)) or "no `model`"
        raise file_error(path, f"has {found}; expected `model`, or `model0`, `model1`, …")
    version, iteration = content.get("checkpoint_version"), content.get("iteration", content.get("total_iters"))
    if version is not None and version not in range(NEWEST_VERSION + 1):
        raise file_error(path, f"checkpoint_version {version!r} is unknown; 0 to {NEWEST_VERSION} can be read")
    flat = [dict(_flatten(content[key])) for key in expected]
    return RankFile(
        path=path,
        chunks=tuple(_chunk(path, tensors) for tensors in flat),
        names=_age([key for tensors in flat for key in tensors]),
        version=version,
        iteration=iteration if isinstance(iteration, int) else None,
        args=fields(content.get("args")),
        has_optimizer="optimizer" in content
        or path.name == "model_rng.pt"
        or (path.parent / "distrib_optim.pt").exists(),
    )


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"a": {"b.c": 1}}` -> ("a.b.c", 1)."""
    for key, value in fields(tree).items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _chunk(path: Path, flat: Mapping[str, Any]) -> Chunk:
    tensors: dict[Name, Stored] = {}
    head: dict[str, Stored] = {}
    keys: dict[tuple[str, int | None], str] = {}
    for key, value in flat.items():
        try:
            name = parse(key)
        except KeyError:
            raise file_error(path, f"unknown tensor {key!r}: {_NO_GPT2}") from None
        if name is None:
            continue
        if name.stacked or name.family != "megatron" or not isinstance(value, StoredTensor | LoadedTensor):
            raise file_error(path, f"{key!r} is no tensor of one of Megatron-LM's layers")
        if key.endswith(COPY_OF_WTE):
            head[name.leaf] = value
        elif (other := keys.setdefault((name.leaf, name.layer), key)) != key:
            raise file_error(path, f"has {other!r} and {key!r}, which are the same tensor")
        else:
            tensors[name] = value
    if not tensors:
        raise file_error(path, "a `model` in it is empty")
    return Chunk(tensors, head)


def _age(keys: Sequence[str]) -> str:
    """Which of Megatron-LM's names these are."""
    bare = [re.sub(r"^(module\.|model\.)+", "", key) for key in keys]
    if any(".linear_" in key for key in bare):
        return "core names, folded norms" if any(".layer_norm_" in key for key in bare) else "core names"
    if all(key.startswith(("word_embeddings", "position_embeddings.", "transformer.")) for key in bare):
        return "2019 names"
    return "language_model names"


def check_alike(files: Sequence[RankFile]) -> None:
    """Raise CheckpointError naming a file that differs from the first in what all files of a checkpoint share."""
    first = files[0]
    for file in files[1:]:
        for what, ours, theirs in (
            ("iteration", first.iteration, file.iteration),
            ("checkpoint_version", first.version, file.version),
            ("the number of interleaved models", len(first.chunks), len(file.chunks)),
            ("args.num_attention_heads", *(number(one.args, "num_attention_heads") for one in (first, file))),
        ):
            if ours != theirs:
                raise file_error(
                    file.path, f"{what} is {theirs}, but {ours} in {first.path}; the ranks do not belong together"
                )


def check_sizes(folder: Path, first: RankFile, ranks: int, stages: int, form: str) -> None:
    """Raise CheckpointError if the arguments tell of other ranks than were found; if there are none, the shapes."""
    tensor = number(first.args, "tensor_model_parallel_size", "model_parallel_size")
    witness = "args" if tensor is not None else "the shapes"
    for what, there, expected in (
        ("tensor", ranks, _ranks_by_shape(first) if tensor is None else tensor),
        ("pipeline", stages, number(first.args, "pipeline_model_parallel_size")),
    ):
        if expected not in (None, there):
            position = min(there, expected)
            name = form.format(*((position, 0) if what == "tensor" else (0, position)))
            problem = "is missing" if there < expected else "does not belong to it"
            raise file_error(
                folder, f"{name} {problem}: {witness} tell of {expected} {what} ranks, and there are {there}"
            )
    chunks = number(first.args, "virtual_pipeline_model_parallel_size")
    if chunks not in (None, len(first.chunks)):
        raise file_error(
            first.path, f"args.virtual_pipeline_model_parallel_size is {chunks}, but it has {len(first.chunks)} models"
        )


def number(args: Mapping[str, Any], *names: str) -> int | None:
    """The first of these arguments that is a count; None if none is recorded."""
    return next((value for name in names if type(value := args.get(name)) is int and value > 0), None)


def _ranks_by_shape(first: RankFile) -> int | None:
    """The tensor ranks over which the rows of c_attn are split."""
    rows = {name.leaf: tensor.shape[0] for name, tensor in first.chunks[0].tensors.items() if len(tensor.shape) == 1}
    width, part = rows.get("ln_1.bias", 0), rows.get("attn.c_attn.bias", 0)
    return 3 * width // part if part and 3 * width % part == 0 else None
