"""The tensors of a checkpoint as the parts that its ranks hold, written, and read in any layout.

They are `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` (not of Muon's matrices) and `step`. There is no random state
to save: dropout and data order are pure functions of the seed and the position in the run.

tensors.json says of each tensor its shape and its parts: rectangles that tile it, each a tensor of the same name in a
safetensors file. A part that several ranks hold is written by one of them.

    {"model.wpe.weight": {"shape": [1024, 768], "parts": [
        {"file": "rank_0_0.safetensors", "offset": [0, 0], "shape": [512, 768]}, …]}, …}

A checkpoint has the true vocabulary rows only: padding belongs to a layout, and is zero after a load.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import BaseModel, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor, nn

from common.errors import CheckpointError
from common.files import digest, write_json
from training.checkpoint.files import THREADS, StoredTensor, read_file, write_file
from training.checkpoint.manifest import Manifest
from training.parallel.collectives import all_gather, run_on_all_ranks
from training.parallel.dtensor import local_shard, shard_bounds, true_shape
from training.tensors import Sizes, all_names, leaf_of

TENSORS = "tensors.json"
_MIN_FILE = 64 << 20  # bytes: a rank starts a second file only above this
_MAX_FILES = 16  # per rank, unless single tensors are larger than a sixteenth of the rank's total


class Shard(NamedTuple):
    """A rectangle of a tensor: what a rank holds of it, without vocabulary padding; it may be empty."""

    whole: tuple[int, ...]
    """The tensor's shape in a checkpoint."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class StoredPart(BaseModel):
    """A shard in a file."""

    file: str
    offset: tuple[NonNegativeInt, ...]
    shape: tuple[NonNegativeInt, ...]


class Entry(BaseModel):
    """A tensor in tensors.json."""

    shape: tuple[NonNegativeInt, ...]
    parts: list[StoredPart]


_INDEX = TypeAdapter(dict[str, Entry])


def state_tensors(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The parameters and optimiser state by their names in a checkpoint, vocabulary padding included.

    All alias live memory.
    """
    tensors: dict[str, Tensor] = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        moments = dict(optimizer.state[parameter])
        tensors["step"] = moments.pop("step")  # equal for all parameters
        tensors |= {f"{moment}.{name}": tensor for moment, tensor in moments.items()}
    return tensors


def held_shards(tensors: Mapping[str, Tensor], vocab_size: int) -> tuple[dict[str, Shard], dict[str, Tensor]]:
    """What this rank holds of each tensor of a checkpoint: which part of it, and its values, which alias the tensor."""
    shards, values = {}, {}
    for key, tensor in tensors.items():
        whole = tuple(true_shape(key.partition(".")[2], tensor, vocab_size))
        shape, offset = shard_bounds(tensor)
        values[key] = local_shard(tensor.detach())
        if whole != tuple(tensor.shape):
            shape = (max(0, min(shape[0], whole[0] - offset[0])), *shape[1:])
            values[key] = values[key][: shape[0]]
        shards[key] = Shard(whole, offset, shape)
    return shards, values


def choose_shards(shards: Mapping[str, Shard], group: Any = None) -> dict[str, Shard]:
    """Choose the shards that this rank writes; all ranks write about as many bytes (a collective call)."""
    holders: dict[tuple[str, Shard], list[int]] = {}
    for rank, held in enumerate(all_gather({key: shard for key, shard in shards.items() if shard.size}, group)):
        for item in held.items():
            holders.setdefault(item, []).append(rank)
    me, written, mine = dist.get_rank(group) if dist.is_initialized() else 0, Counter[int](), {}
    for (key, shard), ranks in sorted(holders.items(), key=lambda item: -item[0][1].size):
        writer = min(ranks, key=written.__getitem__)
        written[writer] += shard.size
        if writer == me:
            mine[key] = shard
    return mine


def write_shards(
    folder: Path, rank: int, shards: Mapping[str, Shard], values: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Write float32 `shards`; returns the files' manifest entries, and what tensors.json says of each shard.

    Several threads write; each copies one tensor at a time to the CPU. Raises OSError when a file cannot be written.
    """

    def write(number: int, keys: list[str]) -> tuple[str, dict[str, Any]]:
        name = f"rank_{rank}_{number}.safetensors"
        described = {key: (torch.float32, shards[key].shape) for key in keys}
        return name, write_file(folder / name, described, map(values.__getitem__, keys))

    files = _split_into_files({key: torch.float32.itemsize * shard.size for key, shard in shards.items()})
    with ThreadPoolExecutor(THREADS) as pool:
        written = list(pool.map(write, range(len(files)), files))
    places = {
        key: {
            "shape": shards[key].whole,
            "parts": [{"file": name, "offset": shards[key].offset, "shape": shards[key].shape}],
        }
        for (name, _), keys in zip(written, files, strict=True)
        for key in keys
    }
    return dict(written), places


def write_index(folder: Path, of_ranks: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """Write tensors.json from what `write_shards` returned on each rank. Returns the manifest's entries."""
    index: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for entries, places in of_ranks:
        files |= entries
        for key, entry in places.items():
            index.setdefault(key, {**entry, "parts": []})["parts"] += entry["parts"]
    write_json(folder / TENSORS, dict(sorted(index.items())), indent=False)
    return {TENSORS: digest(folder / TENSORS), **dict(sorted(files.items()))}


def _split_into_files(sizes: Mapping[str, int]) -> list[list[str]]:
    """The tensors of each file, largest first, so that the threads finish at about the same time."""
    limit = max(_MIN_FILE, sum(sizes.values()) // _MAX_FILES)
    files: list[list[str]] = []
    room = 0
    for key in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if not files or sizes[key] > room:
            files.append([])
            room = limit
        files[-1].append(key)
        room -= sizes[key]
    return files


def read_index(manifest: Manifest) -> dict[str, Entry]:
    """The tensors of a checkpoint. Raises CheckpointError unless tensors.json names files of the checkpoint."""
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


def stored_tensors(manifest: Manifest) -> dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], StoredTensor]]]]:
    """The shape of each tensor, and its parts in files with their offsets."""
    index = read_index(manifest)
    files = {part.file for entry in index.values() for part in entry.parts}
    opened = {file: read_file(manifest.path / file) for file in files}
    return {
        key: (
            entry.shape,
            [(part.offset, _part_of(manifest.path, opened[part.file], key, part)) for part in entry.parts],
        )
        for key, entry in index.items()
    }


def _part_of(folder: Path, opened: Mapping[str, StoredTensor], key: str, part: StoredPart) -> StoredTensor:
    if key not in opened or opened[key].shape != part.shape:
        raise CheckpointError(
            f"{folder / part.file}: has no {key!r} of shape {list(part.shape)}, but {TENSORS} says so"
        )
    return opened[key]


def read_shards(manifest: Manifest, shards: Mapping[str, Shard], values: Mapping[str, Tensor]) -> None:
    """Fill the values of `shards` in place.

    Raises CheckpointError for a tensor that is missing or has another shape, OSError for a file that cannot be read.
    """
    index = read_index(manifest)
    by_file: dict[str, list[tuple[str, StoredPart]]] = {}
    for key, shard in shards.items():
        if key not in index or index[key].shape != shard.whole:
            raise CheckpointError(f"{manifest.path / TENSORS}: no {key!r} of shape {list(shard.whole)}")
        count = 0
        for part in index[key].parts:
            if size := math.prod(end - start for start, end in _overlap(part, shard)):
                by_file.setdefault(part.file, []).append((key, part))
                count += size
        if count != shard.size:
            raise CheckpointError(f"{manifest.path / TENSORS}: the parts of {key!r} do not make it up")

    def read(file: str) -> None:
        opened = read_file(manifest.path / file)
        for key, part in by_file[file]:
            _copy_overlap(_part_of(manifest.path, opened, key, part), part, shards[key], values[key])

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(read, by_file):
            pass


def _overlap(part: StoredPart, wanted: Shard) -> list[tuple[int, int]]:
    """Start and end of what two rectangles share, along each dimension of the whole tensor."""
    both = zip(part.offset, part.shape, wanted.offset, wanted.shape, strict=True)
    return [(max(a, b), max(a, b, min(a + m, b + n))) for a, m, b, n in both]


def _copy_overlap(stored: StoredTensor, part: StoredPart, wanted: Shard, target: Tensor) -> None:
    """Read what `part` and `wanted` share: whole rows of the part, from which columns are cut in memory."""
    shared = _overlap(part, wanted)
    inside = tuple(slice(start - at, end - at) for (start, end), at in zip(shared, wanted.offset, strict=True))
    if shared:
        stored = stored.rows(shared[0][0] - part.offset[0], shared[0][1] - part.offset[0])
    columns = tuple(slice(start - at, end - at) for (start, end), at in zip(shared, part.offset, strict=True))[1:]
    region = target[inside]
    if region.shape == stored.shape:
        stored.read_into(region)
    else:
        region.copy_(stored.read()[(slice(None), *columns)])


def load(manifest: Manifest, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint into this rank's parameters and optimiser state, in any layout (a collective call).

    Each rank reads its own shards, in place. Raises CheckpointError on all ranks if files are missing or damaged after
    their verification.
    """
    tensors = state_tensors(parameters, optimizer)
    run_on_all_ranks(lambda: _read(manifest, tensors))
    for parameter in parameters.values():
        optimizer.state[parameter]["step"].copy_(tensors["step"])


def load_weights(manifest: Manifest) -> dict[str, Tensor]:
    """The full model of a checkpoint, in this process: {name: float32 tensor}, without vocabulary padding."""
    model = manifest.experiment.model
    sizes = Sizes(model.n_embd, 4 * model.n_embd, model.seq_len, model.vocab_size)
    weights = {name: torch.empty(leaf_of(name).shape(sizes)) for name in all_names(model.n_layer)}
    _read(manifest, {f"model.{name}": tensor for name, tensor in weights.items()})
    return weights


def _read(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors`; padding rows become zero."""
    shards, values = held_shards(tensors, manifest.experiment.model.vocab_size)
    for key, tensor in tensors.items():
        if tensor.dim():
            local_shard(tensor.detach())[shards[key].shape[0] :].zero_()
    try:
        read_shards(manifest, shards, values)
    except OSError as error:
        raise CheckpointError(f"{manifest.path}: cannot be read ({error})") from error
