"""The tensors of a checkpoint, written as the parts that the ranks hold, and read in any layout.

They are `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` (not of Muon's matrices) and `step`. There
is no random state to save: dropout and data order are pure functions of the seed and the position
in the run.

tensors.json has the shape and the parts of each tensor. The parts are rectangles that tile it; each
is a tensor of the same name in a safetensors file. One of the ranks that hold a part writes it.

    {"model.wpe.weight": {"shape": [1024, 768], "parts": [
        {"file": "rank_0_0.safetensors", "offset": [0, 0], "shape": [512, 768]}, …]}, …}

A checkpoint has the true vocabulary rows only: padding belongs to a layout, and loads as zeros.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor, nn

from common.errors import CheckpointError
from common.files import digest, write_json
from training.checkpoint.files import THREADS, Block, read_file, write_file
from training.checkpoint.manifest import Manifest
from training.parallel.collectives import all_gather, run_on_all_ranks
from training.parallel.dtensor import local_shard, shard_region, true_shape
from training.region import Region
from training.tensors import Sizes, all_names, leaf_of

TENSORS = "tensors.json"
_MIN_FILE = 64 << 20  # bytes: a rank starts a second file only above this
_MAX_FILES = 16  # per rank, unless single tensors are larger than a sixteenth of the rank's total


class Part(BaseModel):
    """A part of a tensor, in tensors.json."""

    file: str
    offset: tuple[NonNegativeInt, ...]
    shape: tuple[NonNegativeInt, ...]


class Entry(BaseModel):
    """A tensor in tensors.json."""

    shape: tuple[NonNegativeInt, ...]
    parts: list[Part]


Index = dict[str, Entry]
"""The content of tensors.json."""
_INDEX = TypeAdapter(Index)
Files = Mapping[str, Mapping[str, Region]]
"""The shards in each of a rank's files, by key."""


def state_tensors(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The parameters and optimiser state by their names in a checkpoint, with vocabulary padding.

    All alias live memory.
    """
    tensors: dict[str, Tensor] = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        moments = dict(optimizer.state[parameter])
        tensors["step"] = moments.pop("step")  # equal for all parameters
        tensors |= {f"{moment}.{name}": tensor for moment, tensor in moments.items()}
    return tensors


def held_shards(tensors: Mapping[str, Tensor], vocab_size: int) -> tuple[dict[str, Region], dict[str, Tensor]]:
    """This rank's region of each tensor, without padding, and the values there, which alias it."""
    shards, values = {}, {}
    for key, tensor in tensors.items():
        shards[key] = shard_region(tensor).intersection(Region.whole(_shape(key, tensor, vocab_size)))
        values[key] = local_shard(tensor.detach())[Region.whole(shards[key].shape).slices]
    return shards, values


def _shape(key: str, tensor: Tensor, vocab_size: int) -> torch.Size:
    """The shape of a tensor in a checkpoint."""
    return true_shape(key.partition(".")[2], tensor, vocab_size)


def plan_files(shards: Mapping[str, Region], group: Any = None) -> list[Files]:
    """The files of each rank and their shards, equal on all ranks (a collective call).

    A shard that several ranks hold is written by one of them; all ranks write about as many bytes.
    """
    holders: dict[tuple[str, Region], list[int]] = {}
    held = all_gather({key: shard for key, shard in shards.items() if shard.size}, group)
    for rank, of_rank in enumerate(held):
        for item in of_rank.items():
            holders.setdefault(item, []).append(rank)
    chosen: list[dict[str, Region]] = [{} for _ in held]
    written = Counter[int]()  # elements per rank
    for (key, shard), ranks in sorted(holders.items(), key=lambda item: -item[0][1].size):
        writer = min(ranks, key=written.__getitem__)
        written[writer] += shard.size
        chosen[writer][key] = shard
    return [_split_into_files(rank, mine) for rank, mine in enumerate(chosen)]


def _split_into_files(rank: int, shards: Mapping[str, Region]) -> Files:
    """`shards` come largest first: the threads that write the files end at about the same time."""
    sizes = {key: torch.float32.itemsize * shard.size for key, shard in shards.items()}
    limit, room = max(_MIN_FILE, sum(sizes.values()) // _MAX_FILES), 0
    files: list[dict[str, Region]] = []
    for key, shard in shards.items():
        if not files or sizes[key] > room:
            files.append({})
            room = limit
        files[-1][key] = shard
        room -= sizes[key]
    return {f"rank_{rank}_{number}.safetensors": content for number, content in enumerate(files)}


def write_files(folder: Path, files: Files, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a rank's files of float32 tensors; returns the manifest's entry of each.

    Several threads write; each copies one tensor at a time to the CPU. Raises OSError if a file
    cannot be written.
    """

    def write(file: str) -> dict[str, Any]:
        described = {key: (torch.float32, shard.shape) for key, shard in files[file].items()}
        return write_file(folder / file, described, map(values.__getitem__, described))

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(files, pool.map(write, files), strict=True))


def write_index(folder: Path, files: Sequence[Files]) -> dict[str, Any]:
    """Write tensors.json for the files of all ranks; returns its entry in the manifest."""
    index: dict[str, dict[str, Any]] = {}
    for file, shards in (item for of_rank in files for item in of_rank.items()):
        for key, shard in shards.items():
            entry = index.setdefault(key, {"shape": shard.end, "parts": []})
            entry["shape"] = tuple(map(max, entry["shape"], shard.end))  # the parts tile the tensor
            entry["parts"].append({"file": file, **shard._asdict()})
    write_json(folder / TENSORS, dict(sorted(index.items())), indent=False)
    return {TENSORS: digest(folder / TENSORS)}


def read_index(manifest: Manifest) -> Index:
    """Read tensors.json. Raises CheckpointError if it is damaged or names an unlisted file."""
    path = manifest.path / TENSORS
    try:
        index = _INDEX.validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise CheckpointError(f"{path}: damaged ({error.errors()[0]['msg']})") from None
    for key, entry in index.items():
        for part in entry.parts:
            if part.file not in manifest.files:
                raise CheckpointError(f"{path}: {key!r} is in {part.file!r}, which is no file of this checkpoint")
    return index


def open_blocks(manifest: Manifest, index: Index, regions: Mapping[str, Region]) -> dict[str, tuple[Block, ...]]:
    """The stored blocks that overlap each region; opens only the files that have one.

    Raises CheckpointError if a tensor is missing from its file, or has another shape there.
    """
    parts = {
        key: [part for part in index[key].parts if region.intersection(Region(part.offset, part.shape)).size]
        for key, region in regions.items()
    }
    files = {part.file for chosen in parts.values() for part in chosen}
    with ThreadPoolExecutor(THREADS) as pool:
        opened = dict(zip(files, pool.map(lambda file: read_file(manifest.path / file), files), strict=True))
    for key, chosen in parts.items():
        for part in chosen:
            if key not in opened[part.file] or opened[part.file][key].shape != part.shape:
                raise CheckpointError(
                    f"{manifest.path / part.file}: has no {key!r} of shape {list(part.shape)}, but {TENSORS} says so"
                )
    return {key: tuple(Block(part.offset, opened[part.file][key]) for part in parts[key]) for key in parts}


def load(manifest: Manifest, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint into this rank's parameters and optimiser state (a collective call).

    Each rank reads its own shards, in place and in any layout. Raises CheckpointError on all ranks
    if files are missing or damaged after their verification.
    """
    tensors = state_tensors(parameters, optimizer)
    run_on_all_ranks(lambda: _fill(manifest, tensors))
    for parameter in parameters.values():
        optimizer.state[parameter]["step"].copy_(tensors["step"])


def load_weights(manifest: Manifest) -> dict[str, Tensor]:
    """The full model, in this process: {name: float32 tensor}, without vocabulary padding."""
    model = manifest.experiment.model
    sizes = Sizes(model.n_embd, 4 * model.n_embd, model.seq_len, model.vocab_size)
    weights = {name: torch.empty(leaf_of(name).shape(sizes)) for name in all_names(model.n_layer)}
    _fill(manifest, {f"model.{name}": tensor for name, tensor in weights.items()})
    return weights


def _fill(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Read this rank's shards of `tensors`; padding rows become zero."""
    path, index, vocab_size = manifest.path / TENSORS, read_index(manifest), manifest.experiment.model.vocab_size
    for key, tensor in tensors.items():
        shape = _shape(key, tensor, vocab_size)
        if key not in index or index[key].shape != shape:
            raise CheckpointError(f"{path}: no {key!r} of shape {list(shape)}")
    shards, values = held_shards(tensors, vocab_size)
    blocks = open_blocks(manifest, index, shards)
    for key, shard in shards.items():
        if sum(shard.intersection(block.region).size for block in blocks[key]) != shard.size:
            raise CheckpointError(f"{path}: the parts of {key!r} do not make it up")
        if tensors[key].dim():
            local_shard(tensors[key].detach())[shard.shape[0] :].zero_()

    def read(key: str) -> None:
        for block in blocks[key]:
            block.copy_to(values[key], shards[key])

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(read, sorted(shards, key=lambda key: -shards[key].size)):
                pass
    except OSError as error:
        raise CheckpointError(f"{manifest.path}: cannot be read ({error})") from error
