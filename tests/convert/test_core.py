"""Stored tensors, qkv orders, names, joined ranks."""

from pathlib import Path

import pytest
import torch

from convert.files.stored import StoredPieces, StoredTensor
from convert.sources.names import parse
from convert.sources.source import QKV
from tests.convert.encoded import SMALL, truth, where


def test_an_encoded_value_says_where_it_belongs() -> None:
    assert where(float(truth()["h.3.mlp.c_fc.weight"][5, 7])) == "h.3.mlp.c_fc.weight[5, 7]"
    assert SMALL.n_embd == 32


@pytest.mark.parametrize("version", range(4))
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_every_qkv_order_splits_and_joins_to_itself(version: int, shards: int) -> None:
    rows = torch.arange(8 * 3 * 5 * 2).view(-1, 2)
    order = QKV(version, shards)
    parts = order.split(rows, 8)
    assert parts.flatten(1, 2).shape == (3, 8, 5, 2)
    assert torch.equal(order.join(parts), rows)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_rows_of_version_0_are_joined_for_another_number_of_shards(shards: int) -> None:
    rows = torch.arange(8 * 3 * 5 * 2).view(-1, 2)  # 8 heads of 5
    parts = QKV(2).split(rows, 8).flatten(1, 2)  # ((q, k, v), head, dim, …)
    expected = torch.cat([part.flatten(0, 2) for part in parts.chunk(shards, 1)])
    for version in range(3):
        for other in (1, 2, 4):
            stored = QKV(version, other).join(QKV(2).split(rows, 8))
            assert torch.equal(QKV(0, shards).join(QKV(version, other).split(stored, 8)), expected)


def test_stored_tensors_read_rows_of_contiguous_strided_and_partitioned_data(tmp_path: Path) -> None:
    data = torch.arange(24.0)
    path = tmp_path / "data"
    path.write_bytes(b"head" + data.numpy().tobytes())
    plain = StoredTensor(path, 4, torch.float32, (6, 4), (4, 1))
    turned = StoredTensor(path, 4, torch.float32, (4, 6), (1, 4))
    pieces = StoredPieces(
        (6, 4), tuple(StoredTensor(path, 4 + 4 * a, torch.float32, (b - a,)) for a, b in [(0, 3), (3, 17), (17, 24)])
    )
    for stored, whole in ((plain, data.view(6, 4)), (turned, data.view(6, 4).t()), (pieces, data.view(6, 4))):
        assert torch.equal(stored.read(), whole)
        assert torch.equal(stored.rows(1, 3).read(), whole[1:3])
    assert torch.equal(plain[2].read(), data.view(6, 4)[2])


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("word_embeddings.weight", "wte.weight"),
        ("language_model.embedding.position_embeddings.weight", "wpe.weight"),
        ("module.language_model.encoder.layers.3.self_attention.query_key_value.bias", "h.5.attn.c_attn.bias"),
        ("transformer.layers.3.attention.dense.weight", "h.5.attn.c_proj.weight"),
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_weight", "h.5.ln_2.weight"),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_bias", "h.5.ln_1.bias"),
        ("decoder.layers.3.self_attention.linear_qkv.weight", "h.5.attn.c_attn.weight"),
        ("transformer.h.3.mlp.c_proj.weight", "h.5.mlp.c_proj.weight"),
        ("transformer.final_layernorm.bias", "ln_f.bias"),
        ("output_layer.weight", "lm_head.weight"),
        ("decoder.layers.3.mlp.linear_fc1._extra_state", None),
        ("transformer.h.3.attn.masked_bias", None),
    ],
)
def test_names_of_every_age(key: str, name: str | None) -> None:
    found = parse(key)
    assert (found and found.ours(first_layer=2)) == name


@pytest.mark.parametrize("key", ["decoder.layers.0.mlp.router.weight", "lm_head.bias", "h.attn.c_attn.weight"])
def test_unknown_names_raise(key: str) -> None:
    with pytest.raises(KeyError):
        parse(key)
