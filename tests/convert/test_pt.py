"""Nothing that a .pt file names is called, and its tensors are found in place, in the format before torch 1.6 too."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import CheckpointError
from convert.pt import Placeholder, fields, load_pt
from training.checkpoint.files import StoredTensor


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
    found = load_pt(tmp_path / "file.pt")
    assert isinstance(found["planted"], Placeholder) and fields(found["planted"]) == {"value": "stored"}
    assert found["planted"].args == ("touch executed",) and os.listdir() == ["file.pt"]
    assert found["tensor"].read().tolist() == [1, 1, 1]


def write(path: Path, content: Any) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def test_tensors_of_all_kinds_are_found_in_the_file(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    content = {"matrix": matrix, "turned": matrix.t(), "rows": matrix[1:], "again": matrix}
    content |= {"brain": torch.arange(6).bfloat16(), "scalar": torch.tensor(3.5), "empty": torch.empty(0)}
    found = load_pt(write(tmp_path / "old.pt", content))
    assert list(found) == list(content) and found["again"] == found["matrix"]
    for name, tensor in content.items():
        stored = found[name]
        assert isinstance(stored, StoredTensor), name  # of the file: nothing was read yet
        assert stored.dtype == tensor.dtype and torch.equal(stored.read(), tensor), name
    assert found["matrix"].rows(1, 3).read().tolist() == matrix[1:3].tolist()


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
