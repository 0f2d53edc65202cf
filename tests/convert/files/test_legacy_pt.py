"""Files of the format before torch 1.6 give the same tensors as zip files, without being read."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError
from convert.files import legacy_pt
from convert.files.inert import load_inert
from convert.files.stored import StoredTensor


def write(path: Path, content: Any) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def test_tensors_of_all_kinds_are_found_in_the_file(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    content = OrderedDict(
        matrix=matrix,
        turned=matrix.t(),
        rows=matrix[1:],
        half=torch.arange(5).half(),
        brain=torch.arange(6).bfloat16(),
        numbers=torch.arange(4),
        scalar=torch.tensor(3.5),
        empty=torch.empty(0),
        parameter=torch.nn.Parameter(torch.ones(2)),
        again=matrix,
    )
    found = load_inert(write(tmp_path / "old.pt", content))
    assert list(found) == list(content)
    for name, tensor in content.items():
        stored = found[name]
        assert isinstance(stored, StoredTensor), name
        assert stored.dtype == tensor.dtype
        assert torch.equal(stored.read(), tensor), name
    assert found["again"] == found["matrix"]


def test_nothing_but_pickles_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "old.pt", {"a": torch.zeros(1 << 20), "b": torch.ones(1 << 20)})
    monkeypatch.setattr(torch, "load", None)
    read = 0
    original = Path.open

    class Counting:
        def __init__(self, file: Any) -> None:
            self.file = file

        def read(self, count: int = -1) -> bytes:
            nonlocal read
            data: bytes = self.file.read(count)
            read += len(data)
            return data

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> "Counting":
            return self

        def __exit__(self, *_error: object) -> None:
            self.file.close()

    monkeypatch.setattr(Path, "open", lambda path, *args: Counting(original(path, *args)))
    content = load_inert(path)
    assert read < 4096
    monkeypatch.setattr(Path, "open", original)
    assert content["b"].rows(7, 9).read().tolist() == [1, 1]


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.99])
def test_a_file_that_is_cut_off_is_named(share: float, tmp_path: Path) -> None:
    path = write(tmp_path / "old.pt", {"a": torch.zeros(300), "b": torch.ones(300)})
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(CheckpointError, match=r"old\.pt: .*cut off") as caught:
        load_inert(path)
    assert "\n" not in str(caught.value)


def test_a_storage_of_another_size_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "old.pt", {"a": torch.zeros(300)})
    offset = load_inert(path)["a"].offset
    data = bytearray(path.read_bytes())
    data[offset - 8] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"old\.pt: damaged \(a storage of another size"):
        load_inert(path)


def test_another_pickle_is_no_pt_file(tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    path.write_bytes(b"\x80\x02K\x03." * 5)  # the number 3
    with pytest.raises(CheckpointError, match=r"other\.pt: not a \.pt file"):
        legacy_pt.load_meta(path)
