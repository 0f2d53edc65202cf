"""The proof accepts every layout of the same weights and rejects each kind of wrong merge, naming the layer."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.errors import ProofError
from convert.files.stored import LoadedTensor
from convert.proof import prove_source
from convert.sources.source import QKV, Sharded, Source
from tests.convert.encoded import SMALL, truth
from tests.convert.helpers import source_of


def reordered(version: int, shards: int) -> dict[str, Tensor]:
    """The encoded weights with qkv rows in another order."""
    order = QKV(version, shards)
    return {
        name: order.join(
            QKV(3).split(weight, SMALL.n_head).reshape(3, shards if version == 0 else 1, -1, 4, *weight.shape[1:])
        )
        if ".c_attn." in name
        else weight
        for name, weight in truth().items()
    }


@pytest.mark.parametrize("version", range(4))
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_all_orders_and_shards_of_the_same_weights_agree(version: int, tensor: int) -> None:
    source = source_of(reordered(version, tensor), tensor=tensor, qkv=QKV(version, tensor))
    proof = prove_source(source_of(truth()), source)
    assert proof.tokens == 2 * SMALL.n_positions
    assert proof.relative_difference < 1e-5 and proof.largest_layer_difference < 1e-4


def swap(one: str, other: str) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        weights[one], weights[other] = weights[other], weights[one]

    return change


def edit(name: str, how: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        weights[name] = how(weights[name].clone())

    return change


def without_rank(weights: Tensor) -> Tensor:
    weights[:, 8:16] = 0  # the columns of rank 1 of 4
    return weights


def moved(weights: Tensor) -> Tensor:
    return weights.roll(1, 0)


def exchanged(rows: Tensor) -> Tensor:
    """The keys where the queries should be."""
    return rows.view(8, 3, 4, 32)[:, [1, 0, 2]].reshape(96, 32)


def parts_first(rows: Tensor) -> Tensor:
    """[(q, k, v), head, dim] instead of [head, (q, k, v), dim]."""
    return rows.view(8, 3, 4, -1).transpose(0, 1).reshape(rows.shape)


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (edit("h.2.attn.c_attn.weight", exchanged), "attention of layer 2"),
        (edit("h.1.attn.c_attn.weight", parts_first), "attention of layer 1"),
        (edit("h.3.attn.c_attn.bias", parts_first), "attention of layer 3"),
        (swap("h.0.ln_1.weight", "h.0.ln_2.weight"), "attention of layer 0"),
        (swap("h.2.ln_2.bias", "h.2.ln_1.bias"), "attention of layer 2"),
        (swap("h.3.ln_2.weight", "ln_f.weight"), "MLP of layer 3"),
        (edit("ln_f.bias", moved), "logits"),
        (edit("h.1.attn.c_proj.weight", without_rank), "attention of layer 1"),
        (edit("h.1.attn.c_proj.weight", lambda square: square.t().contiguous()), "attention of layer 1"),
        (edit("h.3.mlp.c_proj.bias", moved), "MLP of layer 3"),
        (swap("h.1.mlp.c_fc.weight", "h.2.mlp.c_fc.weight"), "MLP of layer 1"),
        (edit("wpe.weight", moved), "the embedding"),
        (edit("wte.weight", lambda rows: rows[[*range(298), 299, 298]]), "the embedding"),
        (edit("wte.weight", lambda rows: torch.cat([rows[:-1], rows[-1:].fill_(torch.nan)])), "the embedding"),
    ],
)  # fmt: skip
def test_a_wrong_merge_is_rejected_and_its_layer_named(spoil: Callable[[dict[str, Tensor]], None], where: str) -> None:
    weights = truth()
    spoil(weights)
    with pytest.raises(ProofError, match=f"{where} of the result differs from the source's"):
        prove_source(source_of(truth(), tensor=4), source_of(weights))


def test_exchanged_keys_and_queries_of_an_untrained_model_are_rejected() -> None:
    def untrained(generator: torch.Generator) -> Mapping[str, Tensor]:
        return {
            name: torch.ones_like(weight) if "ln" in name and name.endswith("weight")
            else torch.zeros_like(weight) if name.endswith("bias")
            else torch.empty_like(weight).normal_(0, 0.02, generator=generator)
            for name, weight in truth().items()
        }  # fmt: skip

    right = dict(untrained(torch.Generator().manual_seed(1)))
    wrong = dict(right)
    edit("h.3.attn.c_attn.weight", exchanged)(wrong)
    with pytest.raises(ProofError, match="attention of layer 3 of the result differs"):
        prove_source(source_of(right), source_of(wrong))


def test_a_source_that_is_not_finite_is_said_to_be_the_reason() -> None:
    weights = truth()
    weights["h.2.mlp.c_fc.bias"][5] = torch.inf
    with pytest.raises(ProofError, match="MLP of layer 2 is not finite in the source itself"):
        prove_source(source_of(weights), source_of(weights))


def test_conv1d_matrices_and_a_head_of_its_own_agree_with_themselves_in_our_layout() -> None:
    model = replace(SMALL, tied=False, n_inner=96)
    weights = truth(model)
    turned = {
        name: weight.t().contiguous() if weight.dim() == 2 and name.startswith("h.") else weight
        for name, weight in weights.items()
    }
    theirs = source_of(turned, model, qkv=QKV(3), conv1d=True)
    assert prove_source(source_of(weights, model, tensor=2), theirs).relative_difference < 1e-5


def padded(source: Source) -> Source:
    """The same source with rows of NaN after the vocabulary."""
    rows = source.tensors["wte.weight"].blocks[0].tensor.read()
    more = LoadedTensor(torch.cat([rows, torch.full((84, 32), torch.nan)]))
    blocks = (source.tensors["wte.weight"].blocks[0]._replace(tensor=more),)
    return replace(source, tensors={**source.tensors, "wte.weight": Sharded((384, 32), blocks)})


def test_padding_rows_never_reach_the_logits() -> None:
    assert prove_source(padded(source_of(truth())), source_of(truth())).largest_difference == 0
