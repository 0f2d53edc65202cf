"""A padded vocabulary changes neither the loss nor the gradients."""

import pytest
import torch

from common.settings import ModelSettings
from training.loss import LossHead
from training.model import GPT2, summed_loss
from training.parallel.vocabulary import padded_vocab_size

SMALL = ModelSettings(n_layer=3, n_head=4, n_embd=64, seq_len=48, vocab_size=211, dropout=0.0)


def test_the_vocabulary_is_padded_to_a_multiple_of_128_times_tp() -> None:
    assert [padded_vocab_size(50257, tensor) for tensor in (1, 2, 4, 8)] == [50304, 50432, 50688, 51200]
    assert [padded_vocab_size(size, 1) for size in (128, 129)] == [128, 256]


def test_padding_rows_change_neither_loss_nor_gradients() -> None:
    torch.manual_seed(0)
    plain, padded = GPT2(SMALL), GPT2(SMALL.model_copy(update={"vocab_size": 256}))
    padded.head = LossHead(SMALL.vocab_size)
    weights = plain.state_dict()
    weights["wte.weight"] = torch.cat([weights["wte.weight"], torch.full((256 - SMALL.vocab_size, 64), 5.0)])
    padded.load_state_dict(weights)
    tokens = torch.randint(SMALL.vocab_size, (2, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected = summed_loss(plain(inputs), targets)
    expected.backward()
    found = padded.head(padded.ln_f(padded.blocks(padded.embed(inputs))), padded.wte.weight, targets)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(padded.wte.weight.grad[: SMALL.vocab_size], plain.wte.weight.grad, rtol=1e-4, atol=1e-5)
    assert not padded.wte.weight.grad[SMALL.vocab_size :].any()
