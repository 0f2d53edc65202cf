"""Stored tensors and qkv orders."""

from itertools import product
from pathlib import Path

import pytest
import torch

from convert.files.stored import StoredPieces, StoredTensor
from convert.sources.source import QKV


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


def test_stored_tensors_read_rows_of_contiguous_strided_and_partitioned_data(tmp_path: Path) -> None:
    data = torch.arange(24.0)
    path = tmp_path / "data"
    path.write_bytes(b"head" + data.numpy().tobytes())
    plain = StoredTensor(path, 4, torch.float32, (6, 4), (4, 1))
    turned = StoredTensor(path, 4, torch.float32, (4, 6), (1, 4))
    ranges = [(0, 3), (3, 17), (17, 24)]
    pieces = StoredPieces((6, 4), tuple(StoredTensor(path, 4 + 4 * a, torch.float32, (b - a,)) for a, b in ranges))
    for stored, whole in ((plain, data.view(6, 4)), (turned, data.view(6, 4).t()), (pieces, data.view(6, 4))):
        assert torch.equal(stored.read(), whole)
        assert torch.equal(stored.rows(1, 3).read(), whole[1:3])
    assert torch.equal(plain[2].read(), data.view(6, 4)[2])
    with pytest.raises(OSError, match="data"):
        StoredTensor(path, 8, torch.float32, (24,)).read()
