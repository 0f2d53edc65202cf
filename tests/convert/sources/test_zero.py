"""The arithmetic of ZeRO's partitions."""

from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CheckpointError
from convert.sources.zero import cut_group, cut_stage3
from tests.convert.deepspeed_files import partition
from tests.convert.helpers import LoadedTensor
from training.checkpoint.files import StoredTensor


def in_file(file: IO[bytes], tensor: torch.Tensor) -> StoredTensor:
    """The tensor at the end of a file."""
    stored = StoredTensor(Path(file.name), file.tell(), tensor.dtype, tuple(tensor.shape))
    file.write(tensor.numpy().tobytes())
    file.flush()
    return stored


@given(
    groups=st.lists(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=5), max_size=3),
    ranks=st.integers(1, 7),
    stage=st.sampled_from([1, 3]),
    lean=st.booleans(),
)
def test_partitioned_parameters_are_read_back(
    groups: list[list[list[int]]], ranks: int, stage: int, lean: bool
) -> None:
    tensors = [[torch.rand(shape) + 1 for shape in group] for group in groups]
    parts = [partition(group, stage, ranks, lean) for group in tensors]
    shapes = [
        {f"{number}.{position}": tuple(tensor.shape) for position, tensor in enumerate(group)}
        for number, group in enumerate(tensors)
    ]
    with NamedTemporaryFile() as file:
        stored = [[in_file(file, one) for one in part] for part in parts]
        if stage == 3:
            merged = {name: shape for names in shapes for name, shape in names.items()}
            found = cut_stage3(merged, [[part[rank] for part in stored] for rank in range(ranks)])
        else:
            found = {}
            for names, part in zip(shapes, stored, strict=True):
                found |= cut_group(names, part)
        for number, group in enumerate(tensors):
            for position, tensor in enumerate(group):
                whole = found[f"{number}.{position}"]
                assert torch.equal(whole.read(), tensor)
                middle = len(tensor) // 2
                assert torch.equal(whole.rows(middle, len(tensor)).read(), tensor[middle:])


@pytest.mark.parametrize("held", [10, 14])
def test_partitions_of_another_size_are_refused(held: int) -> None:
    parts = [LoadedTensor(torch.zeros(held // 2))] * 2  # 11 elements are 12 in two equal parts
    with pytest.raises(CheckpointError, match=f"hold {held} elements, but the parameters have 11"):
        cut_group({"a": (11,)}, parts)
    with pytest.raises(CheckpointError, match=f"hold {held} elements, but the parameters have 11"):
        cut_stage3({"a": (11,)}, [[part] for part in parts])
