"""Megatron-LM's `mp_rank_*` checkpoints, from 2019 to today: a file per tensor rank and stage.

    iter_0000100/mp_rank_TT/model_optim_rng.pt          PP 1
    iter_0000100/mp_rank_TT_PPP/model_optim_rng.pt      PP 2 and more

`model_rng.pt` if the distributed optimizer of 2022 wrote it; its own files are
`mp_rank_…_DDD/optim.pt`, later `distrib_optim.pt`, and are not read. A file has `model`, or with an
interleaved pipeline `model0`, `model1`, …: the model's layers are those of `model0` of every stage,
then of `model1`. Each of these counts its layers from 0.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from convert.arguments import Options
from convert.megatron_args import check_ranks, json_args, number, read_args
from convert.pt import fields, flatten, load_pt
from convert.sources.consistency import check_alike, check_count, grid, iteration_of
from convert.sources.names import Name, parse
from convert.sources.ranks import architecture, join_ranks, join_stages, qkv_order, tie_head
from convert.sources.source import Sharded, Source, whole
from training.checkpoint.files import StoredTensor
from training.tensors import QKV

_FOLDER = re.compile(r"mp_rank_(?P<column>\d+)(?:_(?P<row>\d+))?")
"""Tensor rank and pipeline stage."""
_MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
_ORDERS = ("[(q, k, v), head, dim] per rank", "[head, dim, (q, k, v)]", "[head, (q, k, v), dim]")


@dataclass(frozen=True)
class _RankFile:
    """The content of one rank's file; no tensor has been read."""

    path: Path
    chunks: tuple[Mapping[Name, Sharded], ...]
    """The tensors of each `model`: a stage, or a part of it if the pipeline is interleaved."""
    names: str
    """The kind of its tensors' names, for people: "2019 names"."""
    version: float | None
    iteration: int | None
    args: Mapping[str, Any]


def matches(folder: Path) -> bool:
    """Whether `folder` holds `mp_rank_*` folders."""
    return any(_FOLDER.match(path.name) and path.is_dir() for path in folder.iterdir())


def open_folder(folder: Path, options: Options) -> Source:
    """The checkpoint in an `iter_*` or `release` folder."""
    files = _open(folder)
    first, (stages, ranks) = files[0][0], (len(files), len(files[0]))
    recorded = read_args(first.args, options)
    tensors, head_notes = tie_head(join_stages(list(_stages(files))), recorded.tied)
    model, notes = architecture(tensors, recorded, shards=ranks)
    qkv = qkv_order(first.version, options, ranks, default=0 if first.names == "2019 names" else None)
    pieces = f", {len(first.chunks)} models per stage" if len(first.chunks) > 1 else ""
    return Source(
        path=folder,
        layout=f"Megatron-LM ({first.names}), {model.n_layer} layers, tensor {ranks} x pipeline {stages}{pieces}, "
        f"qkv rows {_ORDERS[qkv.version]} (version {qkv.version})",
        model=model,
        qkv=qkv,
        tensors=tensors,
        files=tuple(file.path for row in files for file in row),
        iteration=iteration_of(folder, first.iteration),
        consumed_samples=recorded.consumed_samples,
        notes=(*notes, *head_notes),
        facts={"checkpoint_version": first.version, "args": json_args(first.args)},
    )


def _open(folder: Path) -> list[list[_RankFile]]:
    """Every file by stage, then by tensor rank; CheckpointError unless they are one whole save."""
    folders = (path for path in folder.iterdir() if path.is_dir())
    # optim.pt alone: a data-parallel rank's part of the distributed optimizer
    ranks = grid((path for path in folders if _file_in(path) or not (path / "optim.pt").is_file()), _FOLDER)
    if not ranks:
        raise CheckpointError(f"{folder}: no mp_rank_*/{_MODEL_FILES[0]}")
    files = [[_read(path, _file_in(path)) for path in stage] for stage in ranks]
    first = files[0][0]
    tensor = number(first.args, "tensor_model_parallel_size", "model_parallel_size") or _ranks_by_shape(first)
    check_count(ranks, _FOLDER, "column", tensor, "tensor ranks")
    check_count(ranks, _FOLDER, "row", number(first.args, "pipeline_model_parallel_size"), "pipeline ranks")
    by_rank = {(rank, stage): file for stage, row in enumerate(files) for rank, file in enumerate(row)}
    check_ranks([(file.path, file.args, place) for place, file in by_rank.items()], len(files[0]), len(files))
    chunks = number(first.args, "virtual_pipeline_model_parallel_size") or len(first.chunks)
    check_alike(
        (
            file.path,
            {
                "the iteration": file.iteration,
                "checkpoint_version": file.version,
                "the number of interleaved models": (len(file.chunks), chunks),
                "args.num_attention_heads": number(file.args, "num_attention_heads"),
            },
        )
        for file in by_rank.values()
    )
    if chunks != len(first.chunks):
        raise CheckpointError(
            f"{first.path}: has {len(first.chunks)} models, args.virtual_pipeline_model_parallel_size is {chunks}"
        )
    return files


def _file_in(folder: Path) -> Path | None:
    """The file of a rank. Raises CheckpointError if there are two."""
    files = [folder / name for name in _MODEL_FILES if (folder / name).is_file()]
    if len(files) > 1:
        raise CheckpointError(f"{folder}: has {' and '.join(_MODEL_FILES)}; move the one that does not belong away")
    return files[0] if files else None


def _read(folder: Path, path: Path | None) -> _RankFile:
    """A rank's file. CheckpointError if it is damaged, or holds no model or an unknown tensor."""
    if path is None:
        raise CheckpointError(f"{folder}: {_MODEL_FILES[0]} is missing")
    content = fields(load_pt(path))
    models = [key for key in content if isinstance(key, str) and re.fullmatch(r"model\d*", key)]
    expected = ["model"] if "model" in models else [f"model{number}" for number in range(len(models))]
    if not models or set(models) != set(expected):
        keys = ", ".join(sorted(models)) or "no `model`"
        raise CheckpointError(f"{path}: has {keys}; expected `model`, or `model0`, `model1`, …")
    iteration = content.get("iteration", content.get("total_iters"))
    chunks = [dict(flatten(content[key])) for key in expected]
    return _RankFile(
        path=path,
        chunks=tuple(_chunk(path, tensors) for tensors in chunks),
        names=_age([key for tensors in chunks for key in tensors]),
        version=content.get("checkpoint_version"),
        iteration=iteration if isinstance(iteration, int) else None,
        args=fields(content.get("args")),
    )


def _chunk(path: Path, flat: Mapping[str, Any]) -> dict[Name, Sharded]:
    """The tensors of a `model`."""
    tensors: dict[Name, Sharded] = {}
    keys: dict[tuple[str, int | None], str] = {}
    for key, value in flat.items():
        try:
            name = parse(key)
        except KeyError:
            raise CheckpointError(f"{path}: unknown tensor {key!r}: no GPT-2, and nothing else is converted") from None
        if name is None:
            continue
        if name.stacked or name.family != "megatron" or not isinstance(value, StoredTensor):
            raise CheckpointError(f"{path}: {key!r} is no tensor of one of Megatron-LM's layers")
        if (other := keys.setdefault((name.leaf, name.layer), key)) != key:
            raise CheckpointError(f"{path}: has {other!r} and {key!r}, which are the same tensor")
        tensors[name] = whole(value)
    if not tensors:
        raise CheckpointError(f"{path}: a `model` in it is empty")
    return tensors


def _age(keys: Sequence[str]) -> str:
    """The version of Megatron-LM's names."""
    bare = [re.sub(r"^(module\.|model\.)+", "", key) for key in keys]
    if any(".linear_" in key for key in bare):
        return "core names, folded norms" if any(".layer_norm_" in key for key in bare) else "core names"
    if all(key.startswith(("word_embeddings", "position_embeddings.", "transformer.")) for key in bare):
        return "2019 names"
    return "language_model names"


def _stages(files: Sequence[Sequence[_RankFile]]) -> Iterator[tuple[str, dict[str, Sharded]]]:
    """(name, tensors) of every chunk of every stage, layers numbered over all of them."""
    chunks = len(files[0][0].chunks)
    before = 0  # layers
    for chunk in range(chunks):
        for stage, members in enumerate(files):
            title = f"pipeline stage {stage}" + (f", model{chunk}" if chunks > 1 else "")
            layers = sorted({name.layer for name in members[0].chunks[chunk] if name.layer is not None})
            start = layers[0] if layers else 0  # `before` in a build that numbers the layers of all stages
            if start not in (0, before) or layers != list(range(start, start + len(layers))):
                raise CheckpointError(
                    f"{members[0].path}: has the layers {layers[:5]}…; expected 0, 1, … or {before}, {before + 1}, …"
                )
            shift = before - start
            parts = [{name.ours(shift): value for name, value in file.chunks[chunk].items()} for file in members]
            try:
                yield title, join_ranks(parts)
            except CheckpointError as error:
                raise CheckpointError(f"{title}: {error}") from None
            before += len(layers)


def _ranks_by_shape(first: _RankFile) -> int | None:
    """The tensor ranks over which the qkv rows are split."""
    rows = {name.leaf: tensor.shape[0] for name, tensor in first.chunks[0].items() if len(tensor.shape) == 1}
    width, part = rows.get("ln_1.bias", 0), rows.get(f"{QKV}.bias", 0)
    return 3 * width // part if part and 3 * width % part == 0 else None
