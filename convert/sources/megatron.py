"""Read Megatron-LM's `mp_rank_*` checkpoints: ranks and stages joined, the order of qkv rows, what args record.

A pipeline's layers are those of every stage in order. If it is interleaved: of chunk 0 of every stage, then of chunk 1.
Each chunk counts its layers from 0.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from convert.files.stored import same_values
from convert.sources.megatron_args import MegatronArgs, json_args, read_args
from convert.sources.megatron_files import (
    FOLDER,
    NEWEST_VERSION,
    RankFile,
    check_alike,
    check_sizes,
    find_files,
    number,
    read_file,
)
from convert.sources.options import Options
from convert.sources.ranks import GPT2_VOCABULARY, architecture, file_error, join_ranks, join_stages
from convert.sources.source import QKV, Architecture, Sharded, Source

_ROWS = (
    "[(q, k, v), head, dim] per rank",
    "[head, dim, (q, k, v)]",
    "[head, (q, k, v), dim]",
    "[head, (q, k, v), dim]",
)


def matches(folder: Path) -> bool:
    """Whether `folder` holds `mp_rank_*` folders."""
    return any(FOLDER.fullmatch(path.name) and path.is_dir() for path in folder.iterdir())


def open_folder(folder: Path, options: Options) -> Source:
    """The checkpoint in an `iter_*` or `release` folder; no tensor is read, unless args do not say if the head is tied.

    Raises CheckpointError if ranks are missing or do not belong together, or if it is no GPT-2.
    """
    paths, form = find_files(folder)
    files = {rank: read_file(path) for rank, path in sorted(paths.items())}
    first = files[0, 0]
    stages, ranks = (max(position) + 1 for position in zip(*files, strict=True))
    check_alike(list(files.values()))
    check_sizes(folder, first, ranks, stages, form)
    iteration = _iteration(folder, first)
    version = _qkv_version(first, options)
    try:
        recorded = read_args(_settings(first.args), options)
        tensors, head_note = _tie_head(join_stages(list(_stages(files, ranks, stages))), recorded.tied)
        _check_types(tensors)
        model, notes = _architecture(tensors, recorded, first.args, options, ranks)
    except CheckpointError as error:
        raise error if str(folder) in str(error) else file_error(folder, error) from None
    if any(file.has_optimizer for file in files.values()):
        notes = (*notes, "optimizer state is stored by index, not by name: left out")
    pieces = f", {len(first.chunks)} models per stage" if len(first.chunks) > 1 else ""
    return Source(
        path=folder,
        layout=f"Megatron-LM ({first.names}), {model.n_layer} layers, tensor {ranks} x pipeline {stages}{pieces}, "
        f"qkv rows {_ROWS[version]} (version {version})",
        model=model,
        qkv=QKV(version, ranks),
        tensors=tensors,
        files=tuple(paths.values()),
        iteration=iteration,
        consumed_samples=recorded.consumed_samples,
        notes=(*notes, head_note) if head_note else notes,
        facts={"checkpoint_version": first.version, "args": json_args(first.args)},
    )


def _iteration(folder: Path, first: RankFile) -> int | None:
    """Raises CheckpointError if the folder's name says another iteration than the files."""
    named = re.fullmatch(r"iter_(\d+)", folder.name)
    if named and first.iteration not in (None, int(named[1])):
        cure = f"rename it to iter_{first.iteration:07d} if nothing is missing"
        raise file_error(folder, f"its files are of iteration {first.iteration}; {cure}")
    return int(named[1]) if named else first.iteration


def _qkv_version(first: RankFile, options: Options) -> int:
    """The version that gives the order of qkv rows. Raises CheckpointError if nothing tells, or two say different."""
    given = options.qkv_version
    if given is not None and given not in range(NEWEST_VERSION + 1):
        raise CheckpointError(f"--qkv-version {given} is unknown; 0 to {NEWEST_VERSION} exist")
    if first.version is not None:
        if given is not None and QKV(given) != QKV(int(first.version)):
            raise file_error(
                first.path, f"checkpoint_version is {first.version}, but --qkv-version {given}; leave the flag out"
            )
        return int(first.version)
    if given is not None:
        return given
    if first.names == "2019 names":
        return 0
    raise file_error(
        first.path,
        "has no checkpoint_version, so the order of its qkv rows is unknown; give --qkv-version "
        "(Megatron-LM itself reads such a file as 0)",
    )


def _stages(
    files: Mapping[tuple[int, int], RankFile], ranks: int, stages: int
) -> Iterator[tuple[str, dict[str, Sharded]]]:
    """(name, tensors) of every chunk of every stage, in the order of the layers, which get their numbers here."""
    chunks = len(files[0, 0].chunks)
    before = 0  # layers
    for chunk in range(chunks):
        for stage in range(stages):
            members = [files[stage, rank] for rank in range(ranks)]
            title = f"pipeline stage {stage}" + (f", model{chunk}" if chunks > 1 else "")
            layers = members[0].chunks[chunk].layers()
            start = layers[0] if layers else 0  # `before` in a build that numbers the layers of all stages
            if start not in (0, before) or layers != list(range(start, start + len(layers))):
                shown = ", ".join(map(str, layers[:5])) + (", …" if len(layers) > 5 else "")
                raise file_error(
                    members[0].path, f"has the layers {shown}; expected 0, 1, … or {before}, {before + 1}, …"
                )
            parts = [file.chunks[chunk] for file in members]
            try:
                yield title, join_ranks([part.renamed(before - start) for part in parts])
                if any(part.head for part in parts):
                    yield f"{title}, head", join_ranks([part.head for part in parts])
            except CheckpointError as error:
                raise file_error(members[0].path.parent.parent, f"{title}: {error}") from None
            before += len(layers)


def _tie_head(tensors: dict[str, Sharded], tied: bool | None) -> tuple[dict[str, Sharded], str]:
    """The tensors with a tied `output_layer` as a copy of `wte.weight`, and a note; `tied` is what args say.

    The last pipeline stage of Megatron-core has the tied weight under this name.
    """
    head, wte = tensors.get("lm_head.weight"), tensors.get("wte.weight")
    if wte is None:
        return tensors, ""
    if any(copy.shape != wte.shape for copy in wte.copies.values()):
        raise CheckpointError("the last pipeline stage's token embedding has another shape than the first's")
    if head is None or tied is False:
        return tensors, ""
    if tied is None and not _equal(head, wte):
        return tensors, "the head differs from the token embedding: taken as not tied"
    others = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    return {**others, "wte.weight": replace(wte, copies={**wte.copies, "output_layer": head})}, ""


def _equal(one: Sharded, other: Sharded) -> bool:
    """Whether two tensors of the same ranks have the same values."""
    if one.shape != other.shape or one.blocks[0].tensor.dtype != other.blocks[0].tensor.dtype:
        return False
    pairs = zip(one.blocks, other.blocks, strict=True)
    return all(same_values(left.tensor, right.tensor) for left, right in pairs)


def _check_types(tensors: Mapping[str, Sharded]) -> None:
    for name, tensor in tensors.items():
        types = {block.tensor.dtype for block in tensor.blocks}
        if len(types) > 1 or not next(iter(types)).is_floating_point:
            listed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
            raise CheckpointError(f"tensor {name!r} is of {listed} over its ranks; expected one floating-point type")


def _architecture(
    tensors: Mapping[str, Sharded], recorded: MegatronArgs, args: Mapping[str, Any], options: Options, ranks: int
) -> tuple[Architecture, tuple[str, ...]]:
    """Sizes from shapes, constants from args and options, and notes about what was assumed."""
    rows = tensors["wte.weight"].shape[0] if "wte.weight" in tensors else 0
    if options.vocab_size is not None and rows < options.vocab_size:
        raise CheckpointError(f"--vocab-size {options.vocab_size}: the embedding has {rows} rows")
    vocabulary = recorded.vocab_size or _padded_gpt2(rows, args, ranks)
    model, notes = architecture(tensors, n_head=recorded.n_head, vocab_size=vocabulary, shards=ranks)
    return recorded.apply(model), (*notes, *recorded.notes)


def _settings(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments, with what they meant before September 2020: no fused GELU, torch's erf form by default."""
    return {**args, "bias_gelu_fusion": False} if "openai_gelu" in args and "bias_gelu_fusion" not in args else args


def _padded_gpt2(rows: int, args: Mapping[str, Any], ranks: int) -> int | None:
    """GPT-2's vocabulary if `rows` are that, padded to the multiple that was recorded."""
    step = number(args, "make_vocab_size_divisible_by")
    padded = step and -(-GPT2_VOCABULARY // (step * ranks)) * step * ranks
    return GPT2_VOCABULARY if rows == padded else None
