"""Orders of qkv rows."""

from itertools import product

import torch

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
