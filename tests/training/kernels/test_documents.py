"""Attention within documents: its mask, its gradients, and what a GPU would run."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from common.settings import ModelSettings
from tests.numerics import assert_close, logit_terms
from training.dataset.batches import BatchForm, make_batch
from training.kernels import documents
from training.kernels.documents import concatenated, document_attention, document_ends, document_mask
from training.loss import IGNORED
from training.model import GPT2, initial_value, summed_loss

END = 9
SETTINGS = ModelSettings(n_layer=2, n_head=2, n_embd=16, seq_len=12, vocab_size=11, dropout=0.0)
SAMPLES = np.array([[1, 2, END, 3, 4, 5, 6, END, END, 7, 8, 1], [2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, END]])


def model_of(seed: int) -> GPT2:
    model = GPT2(SETTINGS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(5 * initial_value(name, parameter.shape, SETTINGS, seed))
    return model


def gradients(model: GPT2, loss: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, [*model.parameters()])
    return dict(zip((name for name, _ in model.named_parameters()), found, strict=True))


@given(st.lists(st.lists(st.sampled_from([1, 2, END]), min_size=7, max_size=7), min_size=1, max_size=3))
def test_the_mask_equals_a_loop_over_the_tokens(rows: list[list[int]]) -> None:
    mask = document_mask(document_ends(np.array(rows), END), 7)
    for row, tokens in enumerate(rows):
        for query in range(7):
            visible = [key <= query and END not in tokens[key:query] for key in range(7)]
            assert mask[row, 0, query].tolist() == visible
    widened = concatenated([document_ends(np.array(rows), END), torch.tensor([[1, 2, 3, 4, 5, 6, 7, 7]])])
    assert torch.equal(document_mask(widened, 7)[:-1], mask)


def test_the_mask_is_megatron_cores() -> None:
    reference = pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="megatron-core is not installed")
    for row in SAMPLES:
        *_, theirs = reference._get_ltor_masks_and_position_ids(torch.tensor(row), END, True, True, True, True)[::-1]
        ours = document_mask(document_ends(row[None], END), len(row))[0]
        assert torch.equal(theirs.bool(), ~ours)  # theirs is True where a token is hidden


@pytest.mark.parametrize("most_calls", [8, 0])  # document by document, and with a mask
def test_a_packed_sample_has_the_loss_and_gradients_of_its_documents_one_by_one(
    most_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_MOST_CALLS", most_calls)
    model, tokens = model_of(1), torch.from_numpy(SAMPLES)
    positions = torch.arange(12).repeat(2, 1)
    targets = tokens.roll(-1, 1)
    found = summed_loss(model(tokens, positions, document_ends(SAMPLES, END)), targets)
    one_by_one: Any = 0.0
    for row, edges in enumerate(([0, 3, 8, 9, 12], [0, 12])):
        for start, end in pairwise(edges):
            part = slice(start, end)
            logits = model(tokens[row : row + 1, part], positions[row : row + 1, part])
            one_by_one += summed_loss(logits, targets[row : row + 1, part])
    assert_close(found, one_by_one, terms=logit_terms(SETTINGS))
    expected = gradients(model, one_by_one)
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in gradients(model, found).items():
        assert_close(gradient, expected[name], terms=3 * logit_terms(SETTINGS) + 24, scale=largest)


def test_no_other_document_has_a_gradient() -> None:
    model = model_of(2)
    x = model.embed(torch.from_numpy(SAMPLES[:1])).detach().requires_grad_()
    logits = model.logits(model.blocks(x, document_ends(SAMPLES[:1], END)))
    (gradient,) = torch.autograd.grad(logits[0, 3:8].sum(), x)
    assert gradient[0, :3].eq(0).all() and gradient[0, 8:].eq(0).all() and gradient[0, 3:8].ne(0).all()


def test_a_removed_document_changes_the_loss_of_no_other_token() -> None:
    model, form = model_of(3), BatchForm(END, reset_attention_mask=True, eod_mask_loss=True)
    tokens = np.array([[1, 2, END, 3, 4, 5, 6, END, 7, 8, 1, END, 2]])
    removed = tokens.copy()
    removed[:, 3:8] = END  # a tombstone
    batches = [make_batch(each, form) for each in (tokens, removed)]
    logits = [model(batch.tokens, None, batch.ends) for batch in batches]
    before, after = (F.cross_entropy(each.mT, batches[0].targets, reduction="none") for each in logits)
    counted = batches[1].targets[0] != IGNORED
    assert counted.nonzero().flatten().tolist() == [0, 1, 8, 9, 10]
    assert_close(after[:, counted], before[:, counted], terms=logit_terms(SETTINGS))


@settings(max_examples=20)
@given(st.lists(st.sampled_from([1, END]), min_size=6, max_size=6))
def test_dropout_and_compiled_graphs_use_the_mask(tokens: list[int]) -> None:
    q = torch.eye(6)[None, None]
    kept = document_attention(torch.zeros_like(q), torch.zeros_like(q), q, 0.0, document_ends(np.array([tokens]), END))
    assert torch.equal(kept[0, 0] > 0, document_mask(document_ends(np.array([tokens]), END), 6)[0, 0])


def test_a_gpu_takes_flash_attention_on_documents_in_16_bits_without_dropout() -> None:
    def code(dtype: torch.dtype, p: float) -> str:
        with FakeTensorMode(), torch.no_grad():
            q = torch.empty(2, 2, 8, 16, device="cuda", dtype=dtype)
            ends = torch.empty(2, 4, device="cuda", dtype=torch.int64)
            return str(make_fx(document_attention)(q, q, q, p, ends).code)

    assert "torch_attn._varlen_attn" in code(torch.bfloat16, 0.0)
    assert "varlen" not in code(torch.bfloat16, 0.1) + code(torch.float32, 0.0)
