"""Nothing that a .pt file names is called, and its tensors are found in place, in the format before torch 1.6 too."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import CheckpointError
from convert.files.inert import Inert, fields, load_inert
from convert.files.stored import StoredTensor


class Known:
    """A class that a library may have declared safe."""

    def __init__(self) -> None:
        self.value = "stored"

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise AssertionError("called")


@pytest.mark.parametrize("new_format", [False, True])
def test_classes_that_a_library_declared_safe_are_inert_too(new_format: bool, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    content = {"known": Known(), "random": np.random.RandomState(3).get_state(), "tensor": torch.ones(3)}
    torch.save(content, path, _use_new_zipfile_serialization=new_format)
    safe: list[Any] = [Known, np.zeros(1).__reduce__()[0]]
    with torch.serialization.safe_globals(safe):
        found = load_inert(path)
        assert set(torch.serialization.get_safe_globals()) >= set(safe)
    assert isinstance(found["known"], Inert) and fields(found["known"]) == {"value": "stored"}
    assert found["tensor"].read().tolist() == [1, 1, 1]


def write(path: Path, content: Any) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def test_tensors_of_all_kinds_are_found_in_the_file(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    content = {"matrix": matrix, "turned": matrix.t(), "rows": matrix[1:], "again": matrix}
    content |= {"brain": torch.arange(6).bfloat16(), "scalar": torch.tensor(3.5), "empty": torch.empty(0)}
    found = load_inert(write(tmp_path / "old.pt", content))
    assert list(found) == list(content) and found["again"] == found["matrix"]
    for name, tensor in content.items():
        stored = found[name]
        assert isinstance(stored, StoredTensor), name  # of the file: nothing was read yet
        assert stored.dtype == tensor.dtype and torch.equal(stored.read(), tensor), name
    assert found["matrix"].rows(1, 3).read().tolist() == matrix[1:3].tolist()


def test_a_file_that_is_cut_off_or_damaged_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "old.pt", {"a": torch.zeros(300), "b": torch.ones(300)})
    whole, offset = path.read_bytes(), load_inert(path)["a"].offset
    other_size = bytearray(whole)
    other_size[offset - 8] ^= 1
    cut_off = [whole[: int(len(whole) * share)] for share in (0.01, 0.3, 0.6)]
    for damaged in (*cut_off, whole[:-1], bytes(other_size)):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"old\.pt") as caught:
            load_inert(path)
        assert "\n" not in str(caught.value)
