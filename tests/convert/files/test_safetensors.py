"""The library reads what is written here tensor by tensor, and its own files are found in place."""

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import CheckpointError
from convert.files.safetensors import DTYPES, read_file, write_file
from training.checkpoint.storage import HashedFile

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=6), st.sampled_from(FLOATS))
def test_any_shapes_are_read_back_by_the_library_and_by_us(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype
) -> None:
    tensors = {f"t{number}": torch.randn(shape).to(dtype) for number, shape in enumerate(shapes)}
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    write_file(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, dtype, tensors.values())
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == dtype and torch.equal(read[name], tensor)
    assert {name: stored.read().tolist() for name, stored in read_file(path).items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_bits_survive_and_the_header_is_aligned(tmp_path: Path) -> None:
    """Negative zero, subnormals, infinities and NaNs with a payload."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    path = tmp_path / "a.safetensors"
    entry = write_file(path, {"bits": (256, 256)}, torch.float16, [bits.view(torch.float16).view(256, 256)])
    assert torch.equal(load_file(path)["bits"].view(torch.int16).flatten(), bits)
    assert read_file(path)["bits"].offset % 8 == 0
    assert entry["size"] == path.stat().st_size and len(entry["xxh3"]) == 32
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_are_asked_for_one_at_a_time_and_counted(tmp_path: Path) -> None:
    done: list[int] = []

    def tensors() -> Iterator[Tensor]:
        for number in range(3):
            assert len(done) == number  # the one before is written
            yield torch.zeros(number + 1)

    shapes: dict[str, tuple[int, ...]] = {"a": (1,), "b": (2,), "c": (3,)}
    write_file(tmp_path / "a", shapes, torch.float32, tensors(), done.append)
    assert done == [4, 8, 12]


def test_files_of_the_library_are_found_with_every_type(tmp_path: Path) -> None:
    tensors = {name: torch.arange(6).view(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    save_file(tensors, tmp_path / "a")
    for name, stored in read_file(tmp_path / "a").items():
        assert torch.equal(stored.read().double(), tensors[name].double()), name


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = HashedFile.write

    def write_a_little(self: HashedFile, data: object) -> int:
        if self.size > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(HashedFile, "write", write_a_little)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "a", {"a": (9,), "b": (9,)}, torch.float32, [torch.zeros(9), torch.zeros(9)])


def _header(**tensors: object) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


SPOILS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("damaged or cut off", lambda data: b""),
    ("damaged or cut off", lambda data: data[:5]),
    ("damaged or cut off", lambda data: data[:50]),
    ("damaged or cut off", lambda data: b"\xff" * 8 + data[8:]),
    (r"cut off \([\d,]+ bytes, [\d,]+ are expected\)", lambda data: data[:-1]),
    (r"damaged \(3 bytes after the last tensor\)", lambda data: data + b"abc"),
    ("is no JSON", lambda data: data[:8] + b"#" + data[9:]),
    ("header is not understood", lambda data: _header(a=[1])),
    ("header is not understood", lambda data: _header(a={"dtype": "F32", "shape": [1]})),
    (
        "tensor 'a' has type F4, which is not read",
        lambda data: _header(a={"dtype": "F4", "shape": [], "data_offsets": [0, 0]}),
    ),
    (
        r"tensor 'a' of shape \[2\] has 4 bytes",
        lambda data: _header(a={"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}) + b"abcd",
    ),
    (
        "a gap or an overlap before tensor 'a'",
        lambda data: _header(a={"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}) + b"abcdabcd",
    ),
    (
        "a gap or an overlap before tensor 'b'",
        lambda data: (
            _header(
                a={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                b={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            )
            + b"abcd"
        ),
    ),
]


@pytest.mark.parametrize(("says", "spoil"), SPOILS)
def test_a_damaged_file_gives_one_line(tmp_path: Path, says: str, spoil: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(10), "b": torch.ones(3)}, path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(CheckpointError, match=says) as error:
        read_file(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_a_missing_file_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_file(tmp_path / "absent")
