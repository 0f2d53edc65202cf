"""The library reads what is written here tensor by tensor, and its own files are found in place."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from common.errors import CheckpointError
from training.checkpoint.files import read_file, write_file

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=6), st.sampled_from(FLOATS))
def test_any_shapes_are_read_back_by_the_library_and_by_us(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype
) -> None:
    tensors = {f"t{number}": torch.randn(shape).to(dtype) for number, shape in enumerate(shapes)}
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    sizes = {name: (dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    entry = write_file(path, sizes, tensors.values())
    assert entry["size"] == path.stat().st_size
    theirs, ours = load_file(path), read_file(path)
    assert theirs.keys() == ours.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert theirs[name].dtype == ours[name].dtype == dtype
        assert torch.equal(theirs[name], tensor) and torch.equal(ours[name].read(), tensor)
    assert min(stored.offset for stored in ours.values()) % 8 == 0
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def header(*offsets: tuple[int, int], shape: tuple[int, ...] = (1,)) -> bytes:
    """Of tensors a, b, … at these offsets."""
    entries = [{"dtype": "F32", "shape": shape, "data_offsets": offset} for offset in offsets]
    text = json.dumps(dict(zip("ab", entries, strict=False))).encode()
    return len(text).to_bytes(8, "little") + text


def test_a_damaged_file_gives_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(10), "b": torch.ones(3)}, path)
    data = path.read_bytes()
    for damaged in (
        b"",
        data[:-1],
        data + b"abc",
        b"\xff" * 8 + data[8:],
        (5).to_bytes(8, "little") + b"[[1]]",
        header((0, 4), shape=(2,)) + b"abcd",
        header((4, 8)) + b"abcdabcd",
        header((0, 4), (0, 4)) + b"abcd",
    ):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError) as error:
            read_file(path)
        assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
