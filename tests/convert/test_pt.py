"""Nothing that a .pt file names is called, and damage is found before a tensor is used.

Files are of the formats since and before torch 1.6. Every kind of file with a checksum is tried.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch
from torch.serialization import set_crc32_options

from common.errors import CheckpointError
from convert.pt import Placeholder, fields, load_pt, once
from convert.sources.dcp import Dcp
from tests.convert.sources.torch_dist_files import FolderWriter
from training.checkpoint.files import StoredTensor, read_file, write_file
from training.huggingface.config import OLD_WEIGHTS
from training.huggingface.origin import check_hash, write_origin
from training.huggingface.pretrained import load_pretrained


class Planted:
    """Its pickle calls a function, and then the class's own."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch executed",), {"value": "stored"}


@pytest.mark.parametrize("new_format", [False, True])
def test_nothing_that_a_file_names_is_imported_or_called(
    new_format: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"planted": Planted(), "random": np.random.RandomState(3).get_state(), "tensor": torch.ones(3)}
    torch.save(content, "file.pt", _use_new_zipfile_serialization=new_format)
    loaded = load_pt(tmp_path / "file.pt")
    assert isinstance(loaded["planted"], Placeholder) and fields(loaded["planted"]) == {"value": "stored"}
    assert loaded["planted"].args == ("touch executed",) and os.listdir() == ["file.pt"]
    assert loaded["tensor"].read().tolist() == [1, 1, 1]


def write(path: Path, content: Any) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def test_tensors_of_all_kinds_are_found_in_the_file(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    content = {"matrix": matrix, "turned": matrix.t(), "rows": matrix[1:], "again": matrix}
    content |= {"brain": torch.arange(6).bfloat16(), "scalar": torch.tensor(3.5), "empty": torch.empty(0)}
    loaded = load_pt(write(tmp_path / "old.pt", content))
    assert list(loaded) == list(content) and loaded["again"] == loaded["matrix"]
    for name, tensor in content.items():
        stored = loaded[name]
        assert isinstance(stored, StoredTensor), name  # of the file: nothing was read yet
        assert stored.dtype == tensor.dtype and torch.equal(stored.read(), tensor), name
    assert loaded["matrix"].rows(1, 3).read().tolist() == matrix[1:3].tolist()


def test_a_file_that_is_cut_off_or_damaged_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "old.pt", {"a": torch.zeros(300), "b": torch.ones(300)})
    whole, offset = path.read_bytes(), load_pt(path)["a"].offset
    other_size = bytearray(whole)
    other_size[offset - 8] ^= 1
    cut_off = [whole[: int(len(whole) * share)] for share in (0.01, 0.3, 0.6)]
    for damaged in (*cut_off, whole[:-1], bytes(other_size)):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"old\.pt") as caught:
            load_pt(path)
        assert "\n" not in str(caught.value)


VALUES = torch.arange(9.0)


def write_pt(folder: Path) -> Path:
    torch.save({"weight": VALUES, "moment": torch.ones(2)}, folder / "model_optim_rng.pt")
    return folder / "model_optim_rng.pt"


def write_distcp(folder: Path) -> Path:
    writer = FolderWriter(folder)
    for key, tensor in (("moment", VALUES), ("weight", torch.ones(2))):
        writer.add(0, key, tuple(tensor.shape), (0,), tensor)
    writer.close()
    return folder / "__0_0.distcp"


def write_safetensors(folder: Path) -> Path:
    write_file(folder / "model.safetensors", {"weight": (torch.float32, (9,))}, [VALUES])
    write_origin(folder, None)
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    ("write", "opened"),
    [
        (write_pt, lambda path: load_pt(path)["moment"].read),
        (write_distcp, lambda path: Dcp(path.parent).sharded("weight").read),
        (write_safetensors, lambda path: read_file(path, once(check_hash, path))["weight"].read),
        (write_safetensors, lambda path: partial(load_pretrained, path.parent)),
        (lambda it: write_pt(it).rename(it / OLD_WEIGHTS), lambda path: partial(load_pretrained, path.parent)),
    ],
)
def test_a_flipped_bit_is_found_when_the_first_tensor_of_the_file_is_read(
    write: Callable[[Path], Path], opened: Callable[[Path], Callable[[], object]], tmp_path: Path
) -> None:
    path = write(tmp_path)
    (tmp_path / "config.json").write_text('{"n_layer": 1, "n_head": 1, "n_embd": 1, "n_positions": 1, "vocab_size": 2}')
    content = bytearray(path.read_bytes())
    content[content.index(VALUES.numpy().tobytes()) + 13] ^= 4
    path.write_bytes(content)
    read = opened(path)
    for _ in range(2):  # a second read finds it, too
        with pytest.raises(CheckpointError) as error:
            read()
        assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_archives_without_crc32_are_read(tmp_path: Path) -> None:
    set_crc32_options(False)
    path = write_pt(tmp_path)
    set_crc32_options(True)
    assert torch.equal(load_pt(path)["weight"].read(), VALUES)


def test_a_compressed_pt_file_is_refused(tmp_path: Path) -> None:
    """Its tensors would be noise, and proved: both sides of the proof read the same bytes."""
    stored = write_pt(tmp_path)
    with ZipFile(stored) as source, ZipFile(tmp_path / "packed.pt", "w", ZIP_DEFLATED) as packed:
        for name in source.namelist():
            packed.writestr(name, source.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        load_pt(tmp_path / "packed.pt")
