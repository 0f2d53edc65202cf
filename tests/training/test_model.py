"""The model is GPT-2: equal to transformers' with the same weights and the published sizes."""

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from common.settings import ModelSettings
from tests.numerics import assert_close, logit_terms
from tests.training.reference import random_gpt2
from training.huggingface.pretrained import convert_tensors
from training.inference.load import model_from_weights
from training.model import GPT2, IGNORED, initial_value, summed_loss

SMALL = ModelSettings(n_layer=3, n_head=4, n_embd=64, seq_len=48, vocab_size=211, dropout=0.0)
TERMS = logit_terms(SMALL)


def same_models(positions: float = 1.0) -> tuple[GPT2, GPT2LMHeadModel]:
    """Our model and transformers' with the same weights; positions multiplied by `positions`."""
    sizes = {"n_positions": SMALL.seq_len, **SMALL.model_dump(include={"vocab_size", "n_embd", "n_layer", "n_head"})}
    theirs = random_gpt2(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0, **sizes)
    theirs.transformer.wpe.weight.data.mul_(positions)
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    return model_from_weights(SMALL, dict(convert_tensors(weights, SMALL))), theirs


def test_logits_and_gradients_equal_those_of_transformers() -> None:
    ours, theirs = same_models()
    for parameter in ours.parameters():
        parameter.requires_grad_()
    tokens = torch.randint(SMALL.vocab_size, (2, SMALL.seq_len + 1), generator=torch.Generator().manual_seed(2))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    expected, logits = theirs(inputs).logits, ours(inputs)
    assert_close(logits, expected, terms=TERMS)

    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    (summed_loss(logits, targets) / targets.numel()).backward()
    gradients = dict(
        convert_tensors({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}, SMALL)
    )
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert_close(gradients.pop(name), parameter.grad, terms=3 * TERMS + targets.numel())
    assert not gradients


def test_the_345m_model_has_the_parameters_that_the_reference_logs_print() -> None:
    model = ModelSettings(n_layer=24, n_head=16, n_embd=1024, vocab_size=50304)
    with torch.device("meta"):
        assert model.parameters == sum(parameter.numel() for parameter in GPT2(model).parameters()) == 354_871_296


def test_positions_and_ignored_targets_reach_the_loss() -> None:
    torch.manual_seed(0)
    model = GPT2(SMALL).eval()
    tokens = torch.randint(SMALL.vocab_size, (1, 9))
    halves = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    logits = model(tokens[:, :-1], halves).detach()
    assert_close(logits[:, :4], model(tokens[:, :4]), terms=TERMS)
    with pytest.raises(AssertionError, match="times what"):
        assert_close(logits[:, 4:], model(tokens[:, :-1])[:, 4:], terms=1000 * TERMS)
    targets = tokens[:, 1:].clone()
    each = [float(summed_loss(logits[:, i : i + 1], targets[:, i : i + 1])) for i in range(8)]
    targets[0, 3] = targets[0, 6] = IGNORED
    kept = [loss for position, loss in enumerate(each) if position not in (3, 6)]
    assert float(summed_loss(logits, targets)) == pytest.approx(sum(kept), rel=1e-5)
    assert float(summed_loss(logits, torch.full_like(targets, IGNORED))) == 0


def test_initial_values_follow_the_gpt2_recipe() -> None:
    matrix = initial_value("h.0.attn.c_attn.weight", torch.Size((300, 300)), SMALL, seed=1)
    assert matrix.std().item() == pytest.approx(0.02, rel=0.02)
    residual = initial_value("h.0.mlp.c_proj.weight", torch.Size((300, 300)), SMALL, seed=1)
    assert residual.std().item() == pytest.approx(0.02 / (2 * SMALL.n_layer) ** 0.5, rel=0.02)
    assert not initial_value("h.0.attn.c_attn.bias", torch.Size((9,)), SMALL, seed=1).any()
    assert initial_value("ln_f.weight", torch.Size((9,)), SMALL, seed=1).eq(1).all()
    for name, seed in (("h.1.attn.c_attn.weight", 1), ("h.0.attn.c_attn.weight", 2)):
        assert not torch.equal(matrix, initial_value(name, torch.Size((300, 300)), SMALL, seed=seed))
