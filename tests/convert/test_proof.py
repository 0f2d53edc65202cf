"""The proof accepts every layout of the same weights, and names the layer of a wrong merge."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.errors import ProofError
from convert.proof import prove, prove_source, source_outputs
from convert.sources.source import QKV, Sharded, Source
from convert.targets.huggingface import write_folder
from tests.convert.encoded import SMALL, truth
from tests.convert.helpers import LoadedTensor, as_conv1d, in_other_blocks, source_of
from tests.numerics import logit_terms, tolerance

Weights = dict[str, Tensor]
ROUNDING = tolerance(logit_terms(SMALL))


@pytest.mark.parametrize(("version", "tensor"), [(0, 4), (1, 2), (2, 8), (3, 1)])
def test_all_orders_and_shards_of_the_same_weights_agree(version: int, tensor: int) -> None:
    order, weights = QKV(version, tensor), truth()
    for name in [name for name in weights if ".c_attn." in name]:
        parts = QKV(3).split(weights[name], SMALL.n_head)
        weights[name] = order.join(parts.reshape(3, order.shards, -1, 4, *weights[name].shape[1:]))
    proof = prove_source(source_of(truth()), source_of(weights, tensor=tensor, qkv=order))
    assert proof.tokens == 32
    assert max(proof.relative_difference, proof.largest_layer_difference) < ROUNDING


@pytest.mark.parametrize("made", [source_of, as_conv1d])
def test_parts_that_cut_any_dimension_give_the_outputs_of_the_whole(made: Callable[..., Source]) -> None:
    source = made(truth())
    assert prove_source(in_other_blocks(source), source).relative_difference < 1e-6


def test_conv1d_matrices_and_a_head_of_its_own_agree_with_themselves_in_our_layout() -> None:
    model = replace(SMALL, tied=False, n_inner=96)
    weights = truth(model)
    theirs = as_conv1d(weights, model)
    assert prove_source(source_of(weights, model, tensor=2), theirs).relative_difference < ROUNDING
    with pytest.raises(ProofError, match="logits"):
        prove_source(source_of(edit("lm_head.weight", moved)(weights), model), theirs)


def swap(one: str, other: str) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {one: weights[other], other: weights[one]}


def edit(name: str, how: Callable[[Tensor], Tensor]) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: how(weights[name].clone())}


def without_rank(weights: Tensor) -> Tensor:
    weights[:, 8:16] = 0  # the columns of rank 1 of 4
    return weights


def moved(weights: Tensor) -> Tensor:
    return weights.roll(1, 0)


def exchanged(rows: Tensor) -> Tensor:
    """The keys where the queries should be."""
    return rows.view(8, 3, 4, 32)[:, [1, 0, 2]].reshape(96, 32)


WRONG: list[tuple[Callable[[Weights], Weights], str]] = [
    (edit("h.2.attn.c_attn.weight", exchanged), "attention of layer 2"),
    (swap("h.0.ln_1.weight", "h.0.ln_2.weight"), "attention of layer 0"),
    (swap("h.3.ln_2.weight", "ln_f.weight"), "MLP of layer 3"),
    (edit("ln_f.bias", moved), "logits"),
    (edit("h.1.attn.c_proj.weight", without_rank), "attention of layer 1"),
    (edit("h.3.mlp.c_proj.bias", moved), "MLP of layer 3"),
    (edit("wpe.weight", moved), "the embedding"),
    (edit("wte.weight", lambda rows: rows[[*range(298), 299, 298]]), "the embedding"),
    (edit("wte.weight", lambda rows: torch.cat([rows[:-1], rows[-1:].fill_(torch.nan)])), "the embedding"),
]


@pytest.mark.parametrize(("spoil", "where"), WRONG)
def test_a_wrong_merge_is_rejected_and_its_layer_named(
    spoil: Callable[[Weights], Weights], where: str, tmp_path: Path
) -> None:
    """Both in another layout, and in the written files."""
    source, wrong = source_of(truth(), tensor=4), source_of(spoil(truth()))
    with pytest.raises(ProofError, match=where):
        prove_source(source, wrong)
    write_folder(tmp_path, wrong)
    with pytest.raises(ProofError, match=where):
        prove(source, source_outputs(source), tmp_path)


def test_the_files_of_the_right_weights_are_accepted_in_the_type_that_was_asked_for(tmp_path: Path) -> None:
    source = source_of(truth(), tensor=4)
    write_folder(tmp_path, source, dtype=torch.bfloat16, max_shard_size=20_000)
    assert prove(source, source_outputs(source, torch.bfloat16), tmp_path).relative_difference < ROUNDING
    with pytest.raises(ProofError):
        prove(source, source_outputs(source), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"].popitem()
    index.write_text(json.dumps(content))
    with pytest.raises(ProofError, match=index.name):
        prove(source, source_outputs(source, torch.bfloat16), tmp_path)


@pytest.mark.parametrize(
    ("name", "where", "tolerated", "too_much"), [("ln_f", "logits", 5e-5, 2e-4), ("h.3.mlp.c_proj", "MLP", 8e-4, 2e-3)]
)
def test_a_difference_is_tolerated_up_to_a_limit(name: str, where: str, tolerated: float, too_much: float) -> None:
    def scaled(share: float) -> str:
        """What the proof says of this output times 1 + share."""
        weights = truth() | {
            key: weight * (1 + share) for key, weight in truth().items() if key.rpartition(".")[0] == name
        }
        try:
            return str(prove_source(source_of(truth()), source_of(weights)).largest_difference)
        except ProofError as error:
            return str(error)

    assert where not in scaled(tolerated) and where in scaled(too_much)


def test_a_source_that_is_not_finite_is_said_to_be_the_reason() -> None:
    weights = truth()
    weights["h.2.mlp.c_fc.bias"][5] = torch.inf
    with pytest.raises(ProofError, match="MLP of layer 2 is not finite in the source itself"):
        prove_source(source_of(weights), source_of(weights))


def test_padding_rows_never_reach_the_logits() -> None:
    source = source_of(truth())
    (rows,) = source.tensors["wte.weight"].blocks
    more = rows._replace(tensor=LoadedTensor(torch.cat([rows.tensor.read(), torch.full((84, 32), torch.nan)])))
    padded = replace(source, tensors={**source.tensors, "wte.weight": Sharded((384, 32), (more,))})
    assert prove_source(padded, source).largest_difference == 0
