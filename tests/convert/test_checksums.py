"""A flipped bit is found before a tensor is used, in every kind of file that has a checksum."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from torch.serialization import set_crc32_options

from common.errors import CheckpointError
from convert.pt import load_pt, once
from convert.sources.dcp import Dcp
from tests.convert.sources.torch_dist_files import FolderWriter
from training.checkpoint.files import read_file, write_file
from training.huggingface.config import OLD_WEIGHTS
from training.huggingface.origin import check_hash, write_origin
from training.huggingface.pretrained import load_pretrained

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
    """Its tensors would be read as noise, and proved as noise, as both sides of the proof read the same bytes."""
    stored = write_pt(tmp_path)
    with ZipFile(stored) as source, ZipFile(tmp_path / "packed.pt", "w", ZIP_DEFLATED) as packed:
        for name in source.namelist():
            packed.writestr(name, source.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        load_pt(tmp_path / "packed.pt")
