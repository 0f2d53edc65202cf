"""Nothing that a .pt file names is called, whatever this process holds to be safe."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convert.files.inert import Inert, fields, load_inert


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
