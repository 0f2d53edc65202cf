"""A tensor in parts is read as one, whatever dimensions the parts cut; orders of qkv rows."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convert.assemble import assemble
from convert.sources.source import QKV, Source, row_bands
from tests.convert.encoded import truth
from tests.convert.helpers import as_conv1d, in_blocks, in_other_blocks, source_of


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    return torch.arange(torch.Size(shape).numel()).view(shape)


@given(data=st.data(), tensor=tensors())
def test_the_whole_its_rows_and_its_bands_are_those_of_the_tensor(data: st.DataObject, tensor: torch.Tensor) -> None:
    counts = data.draw(st.tuples(*(st.integers(1, size) for size in tensor.shape)))
    sharded = in_blocks(tensor, *counts)
    assert sharded.dtype == tensor.dtype and torch.equal(sharded.read(), tensor)
    first = data.draw(st.integers(0, len(tensor) - 1))
    last = data.draw(st.integers(first + 1, len(tensor)))
    rows = sharded.rows(first, last)
    assert rows.shape == (last - first, *tensor.shape[1:]) and torch.equal(rows.read(), tensor[first:last])
    elements, tiled = data.draw(st.integers(1, 30)), torch.zeros_like(tensor)
    assert torch.equal(torch.cat([*row_bands(sharded, elements)]), tensor)
    for offset, band in sharded.bands(elements):
        tiled[tuple(slice(at, at + size) for at, size in zip(offset, band.shape, strict=True))] += band
    assert torch.equal(tiled, tensor)


@pytest.mark.parametrize("made", [source_of, as_conv1d])
def test_a_merge_reads_blocks_that_cut_any_dimension(made: Callable[..., Source]) -> None:
    source = made(truth())
    for name, weight in truth().items():
        cut = in_other_blocks(source)
        assert torch.equal(assemble(cut, name), weight), name
        assert torch.equal(*(assemble(one, name, conv1d=True, dtype=torch.float64) for one in (source, cut))), name


def test_qkv_rows_of_every_order_and_number_of_shards_become_those_of_any_other() -> None:
    rows = torch.arange(8 * 3 * 5 * 2).view(-1, 2)  # [head, (q, k, v), dim]: 8 heads of 5
    heads = rows.view(8, 3, 5, 2)
    for shards in (1, 2, 4):
        ranks = heads.chunk(shards)
        expected = {
            QKV(0, shards): torch.cat([rank.transpose(0, 1).reshape(-1, 2) for rank in ranks]),
            QKV(1, shards): torch.cat([rank.transpose(1, 2).reshape(-1, 2) for rank in ranks]),
            QKV(2, shards): rows,
        }
        assert QKV(3, shards) == QKV(2)
        for (order, stored), source in product(expected.items(), (QKV(0, 2), QKV(1), QKV(3))):
            assert torch.equal(order.split(stored, 8).flatten(1, 2), heads.movedim(1, 0))
            assert torch.equal(order.join(source.split(source.join(QKV(3).split(rows, 8)), 8)), stored)
