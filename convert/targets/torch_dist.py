"""Write Megatron-core's `torch_dist`: what `dist_checkpointing.load` and Megatron-LM's --load read.

FOLDER/latest_checkpointed_iteration.txt   100, or "release" if the source has no iteration
FOLDER/iter_0000100/  .metadata, __0_N.distcp   tensors of the whole model, layers stacked
                      metadata.json             {"sharded_backend": "torch_dist", …}
                      common.pt                 args, iteration, checkpoint_version

Only weights are written: load with --no-load-optim --no-load-rng, or --finetune.
"""

import argparse
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from convert.assemble import assemble
from convert.megatron_args import args_of
from convert.sources.source import Architecture, Source
from convert.targets.megatron import begin_run, key_of
from training.checkpoint.files import HashedFile
from training.parallel.sizes import padded_vocab_size
from training.tensors import HEAD, LAYER_LEAVES, ROOT_LEAVES, VOCABULARY

_FILE = 1 << 30  # bytes after which another file is begun: readers open several at a time
# loading a model needs the (empty) extra state of these; the third exists only with Transformer
# Engine
_EXTRA_STATE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def write(source: Source, folder: Path, *, tp: int, pp: int) -> None:
    """Write a run into the empty `folder`, a tensor at a time; see `begin_run`.

    The tensors are whole and load in any layout; `tp` decides the padding of the vocabulary.
    """
    model = source.model
    recorded, rows = args_of(source, tp, pp, "torch_dist"), padded_vocab_size(model.vocab_size, tp)
    target = begin_run(source, folder, tp, pp)
    target.mkdir()
    with _Writer(target) as writer:
        for ours, key, layer in _keys(model):
            tensor = assemble(source, ours)
            if layer is not None:
                shape, offset = (model.n_layer, *tensor.shape), (layer, *[0] * tensor.ndim)
                writer.add(key, shape, offset, tensor[None])
            else:
                shape = (rows if ours in VOCABULARY else len(tensor), *tensor.shape[1:])
                writer.add(key, shape, (0,) * tensor.ndim, tensor)
                if shape[0] > len(tensor):  # the last row again: see `convert.targets.megatron`
                    writer.add(key, shape, (len(tensor), 0), tensor[-1:].repeat(shape[0] - len(tensor), 1))
        for layer in range(model.n_layer):
            for module in _EXTRA_STATE:
                writer.add_object(f"decoder.layers.{module}._extra_state/shard_{layer}_{model.n_layer}", [None])
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backends |= {"common_backend": "torch", "common_backend_version": 1}
    (target / "metadata.json").write_text(json.dumps(backends))
    common = {
        "args": argparse.Namespace(**recorded),
        "iteration": source.iteration or 0,
        "checkpoint_version": 3.0,
        "num_floating_point_operations_so_far": 0,
    }
    with HashedFile(target / "common.pt") as file:
        torch.save(common, file)  # type: ignore[arg-type]


def _keys(model: Architecture) -> Iterator[tuple[str, str, int | None]]:
    """Our name, the key, and the index in a stacked tensor."""
    for leaf in ROOT_LEAVES.values():
        if leaf.name != HEAD or not model.tied:
            yield leaf.name, key_of(leaf), None
    for layer in range(model.n_layer):
        for leaf in LAYER_LEAVES.values():
            yield f"h.{layer}.{leaf.name}", key_of(leaf, folded=True), layer


class _Writer:
    """Records in `.distcp` files, and at the end the `.metadata` that says where they are."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, 1
        self._metadata = Metadata({}, None, {}, StorageMeta(), CURRENT_DCP_VERSION)
        self._file = HashedFile(folder / "__0_0.distcp")

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        self._file.__exit__(kind)
        if kind is None:
            (self._folder / ".metadata").write_bytes(pickle.dumps(self._metadata))

    def add(self, key: str, shape: tuple[int, ...], offset: tuple[int, ...], chunk: Tensor) -> None:
        """Write the part of a tensor of shape `shape` that begins at `offset`."""
        described = self._metadata.state_dict_metadata.setdefault(
            key, TensorStorageMetadata(TensorProperties(chunk.dtype), torch.Size(shape), [])
        )
        assert isinstance(described, TensorStorageMetadata)
        if chunk.untyped_storage().nbytes() > chunk.nbytes:
            chunk = chunk.clone()  # torch.save would write the whole storage of a view
        described.chunks.append(ChunkStorageMetadata(torch.Size(offset), chunk.shape))
        self._append(MetadataIndex(key, offset, len(described.chunks) - 1), chunk)

    def add_object(self, key: str, content: Any) -> None:
        """Write an object that is no tensor."""
        self._metadata.state_dict_metadata[key] = BytesStorageMetadata()
        self._append(MetadataIndex(key), content)

    def _append(self, index: MetadataIndex, content: Any) -> None:
        if self._file.size > _FILE:
            self._file.__exit__(None)
            self._file = HashedFile(self._folder / f"__0_{self._files}.distcp")
            self._files += 1
        start = self._file.size
        torch.save(content, self._file)  # type: ignore[arg-type]
        self._metadata.storage_data[index] = _StorageInfo(self._file.path.name, start, self._file.size - start)
