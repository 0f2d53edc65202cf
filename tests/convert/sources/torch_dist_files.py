"""Writes Megatron-core's torch_dist folders, chunked as ranks would, without megatron-core."""

import argparse
import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from convert.sources.source import Architecture
from tests.convert.encoded import SMALL
from tests.convert.megatron_files import SPLIT, Layout, key_of, recorded_args


class FolderWriter:
    """A DCP folder: `add` chunks and objects, then `close`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.metadata = Metadata({}, None, {}, StorageMeta(str(folder)), "1.0.0")

    def add(self, rank: int, key: str, shape: tuple[int, ...], offset: tuple[int, ...], chunk: Tensor) -> None:
        """Write a chunk into the file of a rank."""
        described = self.metadata.state_dict_metadata.setdefault(
            key, TensorStorageMetadata(TensorProperties(chunk.dtype), torch.Size(shape), [])
        )
        assert isinstance(described, TensorStorageMetadata)
        self._append(rank, MetadataIndex(key, offset, len(described.chunks)), chunk.clone())
        described.chunks.append(ChunkStorageMetadata(torch.Size(offset), chunk.shape))

    def add_object(self, rank: int, key: str, content: Any) -> None:
        """Write what is no tensor."""
        self.metadata.state_dict_metadata[key] = BytesStorageMetadata()
        self._append(rank, MetadataIndex(key), content)

    def close(self) -> None:
        (self.folder / ".metadata").write_bytes(pickle.dumps(self.metadata))

    def _append(self, rank: int, index: MetadataIndex, content: Any) -> None:
        record, name = io.BytesIO(), f"__{rank}_0.distcp"
        torch.save(content, record)
        with (self.folder / name).open("ab") as file:
            self.metadata.storage_data[index] = _StorageInfo(name, file.tell(), len(record.getvalue()))
            file.write(record.getvalue())


def arguments(model: Architecture, **changes: Any) -> argparse.Namespace:
    """What Megatron records about the model."""
    recorded = recorded_args(Layout("core", 3.0, model=model))
    return argparse.Namespace(**{**recorded, "position_embedding_type": "learned_absolute", **changes})


def padded(weights: Mapping[str, Tensor], rows: int = 384) -> dict[str, Tensor]:
    """The same with more rows in the vocabulary's tensors, of values that no weight has."""
    return {
        name: torch.cat((tensor, torch.full((rows - len(tensor), tensor.shape[1]), 9.0, dtype=tensor.dtype)))
        if name in ("wte.weight", "lm_head.weight")
        else tensor
        for name, tensor in weights.items()
    }


class _Flattened(FolderWriter):
    """Writes each chunk flat and in two pieces, into the tables of another writer."""

    def __init__(self, writer: FolderWriter) -> None:
        self.folder, self.metadata = writer.folder, writer.metadata

    def add(self, rank: int, key: str, shape: tuple[int, ...], offset: tuple[int, ...], chunk: Tensor) -> None:
        counts = tuple(whole // part for whole, part in zip(shape, chunk.shape, strict=True))
        index = tuple(start // part for start, part in zip(offset, chunk.shape, strict=True))
        flat, cut = chunk.reshape((1,) * chunk.ndim + (-1,)), chunk.numel() // 3
        for start, piece in ((cut, flat[..., cut:]), (0, flat[..., :cut])):
            super().add(rank, key, (*counts, chunk.numel()), (*index, start), piece)


def add_flattened(writer: FolderWriter, weights: Mapping[str, Tensor], prefix: str, **layout: Any) -> None:
    """Write tensors as megatron-core's distributed optimizer did until 0.15."""
    add_model(_Flattened(writer), weights, prefix=prefix, **layout)


def add_model(
    writer: FolderWriter,
    weights: Mapping[str, Tensor],
    *,
    tp: int = 1,
    pp: int = 1,
    stacked: bool = True,
    prefix: str = "",
    n_layer: int = SMALL.n_layer,
) -> None:
    """Write tensors in our layout ([out, in], padded vocabulary) as tp x pp ranks would."""
    for name, tensor in weights.items():
        key, dim, lead = key_of(name, "folded"), SPLIT.get(name), ()
        stage = 0 if name in ("wte.weight", "wpe.weight") else pp - 1
        if name.startswith("h."):
            _, number, leaf = name.split(".", 2)
            dim, stage = SPLIT.get(leaf), int(number) // (n_layer // pp)
            if stacked:
                key, lead = key.replace(f".{number}.", ".", 1), (int(number),)
        shape = (n_layer, *tensor.shape) if lead else tuple(tensor.shape)
        parts = [tensor] if dim is None else list(tensor.chunk(tp, dim))
        for rank, part in enumerate(parts):
            offset = tuple(rank * part.shape[axis] if axis == dim else 0 for axis in range(tensor.ndim))
            writer.add(stage * tp + rank, prefix + key, shape, (*lead, *offset), part[None] if lead else part)


def write_backend(folder: Path, backend: str = "torch_dist") -> None:
    content = {"sharded_backend": backend, "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps({**content, "common_backend": "torch"}))


def write_folder(
    folder: Path,
    weights: Mapping[str, Tensor],
    model: Architecture = SMALL,
    *,
    common: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    **layout: Any,
) -> FolderWriter:
    """A whole checkpoint of iteration 100, ready but for `close`."""
    writer = FolderWriter(folder)
    add_model(writer, padded(weights), n_layer=model.n_layer, **layout)
    write_backend(folder)
    tp, pp = layout.get("tp", 1), layout.get("pp", 1)
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    content = {"args": arguments(model, **sizes, **(args or {})), "iteration": 100, "checkpoint_version": 3.0}
    torch.save({**content, **(common or {})}, folder / "common.pt")
    return writer
