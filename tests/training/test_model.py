"""The model is GPT-2: equal to transformers' with the same weights and the published sizes."""

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from common.settings import ModelSettings
from training.huggingface.pretrained import from_hugging_face, to_hugging_face
from training.inference.load import model_from_weights
from training.model import GPT2, IGNORED, initial_value, summed_loss

SMALL = ModelSettings(n_layer=3, n_head=4, n_embd=64, seq_len=48, vocab_size=211, dropout=0.0)


def reference_model() -> GPT2LMHeadModel:
    """transformers' GPT-2 of the small size, with weights far from their initial values."""
    config = GPT2Config(
        vocab_size=SMALL.vocab_size,
        n_positions=SMALL.seq_len,
        n_embd=SMALL.n_embd,
        n_layer=SMALL.n_layer,
        n_head=SMALL.n_head,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = GPT2LMHeadModel(config)
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.1))
    return model


def test_logits_and_gradients_equal_those_of_transformers() -> None:
    theirs = reference_model()
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    ours = model_from_weights(SMALL, from_hugging_face(weights, SMALL))
    for parameter in ours.parameters():
        parameter.requires_grad_()
    tokens = torch.randint(SMALL.vocab_size, (2, SMALL.seq_len + 1), generator=torch.Generator().manual_seed(2))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    expected = theirs(inputs).logits
    logits = ours(inputs)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()

    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    (summed_loss(logits, targets) / targets.numel()).backward()
    gradients = to_hugging_face({name: parameter.grad for name, parameter in ours.named_parameters()}, SMALL)
    assert len(gradients) == len(weights)
    for name, parameter in theirs.named_parameters():
        difference = (gradients[name] - parameter.grad).abs().max()
        # The key bias has a mathematically zero gradient: compare with the largest entry of the whole tensor.
        assert difference <= 1e-4 * parameter.grad.abs().max(), name


def test_345m_has_the_parameters_that_the_reference_logs_print() -> None:
    medium = ModelSettings(n_layer=24, n_head=16, n_embd=1024)
    assert medium.model_copy(update={"vocab_size": 50304}).parameters == 354_871_296
    assert medium.parameters == 354_871_296 - 47 * 1024


@pytest.mark.parametrize("model", [SMALL, ModelSettings(n_layer=2, n_head=2, n_embd=6, seq_len=3, vocab_size=5)])
def test_parameters_are_counted_as_the_model_has_them(model: ModelSettings) -> None:
    with torch.device("meta"):
        assert model.parameters == sum(parameter.numel() for parameter in GPT2(model).parameters())


def test_positions_and_ignored_targets_reach_the_loss() -> None:
    torch.manual_seed(0)
    model = GPT2(SMALL).eval()
    tokens = torch.randint(SMALL.vocab_size, (1, 9))
    halves = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    logits = model(tokens[:, :-1], halves).detach()
    assert torch.equal(model(tokens[:, :-1], torch.arange(8)[None]), model(tokens[:, :-1]))
    assert torch.allclose(logits[:, :4], model(tokens[:, :4]), atol=1e-6)
    assert not torch.allclose(logits[:, 4:], model(tokens[:, :-1])[:, 4:], atol=1e-3)
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
    assert not torch.equal(matrix, initial_value("h.1.attn.c_attn.weight", torch.Size((300, 300)), SMALL, seed=1))
    assert not torch.equal(matrix, initial_value("h.0.attn.c_attn.weight", torch.Size((300, 300)), SMALL, seed=2))


def test_no_token_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model = GPT2(SMALL).eval()
    tokens = torch.randint(SMALL.vocab_size, (1, 20))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % SMALL.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[0, :10], after[0, :10], atol=1e-6)
    assert not torch.allclose(before[0, 10:], after[0, 10:], atol=1e-3)
