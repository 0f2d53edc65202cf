"""Regions of a tensor, and blocks in files that are read in another layout."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from training.checkpoint.files import Block, read_file
from training.region import Region


@st.composite
def regions_of(draw: st.DrawFn, shape: list[int]) -> Region:
    ranges = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    return Region(tuple(first for first, _ in ranges), tuple(last - first for first, last in ranges))


@settings(max_examples=50)
@given(st.data(), st.lists(st.integers(1, 5), max_size=3))
def test_a_region_gets_from_a_block_in_a_file_what_both_have(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: list[int]
) -> None:
    tensor = torch.arange(1.0, 1 + Region.whole(shape).size).view(shape)
    part, wanted = data.draw(regions_of(shape)), data.draw(regions_of(shape))
    path: Path = tmp_path_factory.mktemp("part") / "part.safetensors"
    save_file({"part": tensor[part.slices].contiguous()}, path)
    target, expected = torch.zeros(wanted.shape), torch.zeros(shape)
    shared = part.intersection(wanted)
    expected[shared.slices] = tensor[shared.slices]
    assert shared == wanted.intersection(part) or not shared.size
    if shared.size:
        Block(part.offset, read_file(path)["part"]).copy_to(target, wanted)
    assert torch.equal(target, expected[wanted.slices])
