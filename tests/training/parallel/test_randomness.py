"""Dropout's streams: equal outside split regions, different inside, and the same after any restart."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from common.settings import ModelSettings
from training.model import GPT2
from training.parallel.randomness import RandomStreams

SETTINGS = ModelSettings(n_layer=2, n_head=2, n_embd=16, seq_len=8, vocab_size=32, dropout=0.5)


def draws(
    data_rank: int, tensor_rank: int, iteration: int, seed: int = 1, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers drawn inside the attention cores and outside of them, in one forward pass of one rank."""
    model = GPT2(SETTINGS).to(device)
    streams = RandomStreams(seed, (0, data_rank), torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
    streams.attach(model, tensor_rank)
    inside: list[torch.Tensor] = []
    for block in model.h.values():
        block.attn.core.forward = lambda q, k, v: inside.append(torch.rand(4, device=device)) or v
    streams.start_iteration(iteration)
    model(torch.zeros(1, 8, dtype=torch.long, device=device))
    return torch.cat(inside), torch.rand(4, device=device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensor_ranks_share_the_outside_and_differ_inside(device: str) -> None:
    (inside_0, outside_0), (inside_1, outside_1) = draws(0, 0, 5, device=device), draws(0, 1, 5, device=device)
    assert torch.equal(outside_0, outside_1)
    assert len(torch.cat([inside_0, inside_1, outside_0]).unique()) == 20  # nothing is drawn twice


def test_data_ranks_iterations_and_seeds_all_differ() -> None:
    first = draws(0, 0, 5)
    for other in (draws(1, 0, 5), draws(0, 0, 6), draws(0, 0, 5, seed=2)):
        assert not torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])


def test_numbers_depend_on_the_iteration_not_on_earlier_draws() -> None:
    first = draws(0, 1, 5)
    torch.rand(1000)
    again = draws(0, 1, 5)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_a_recomputed_layer_draws_the_same_numbers_in_its_split_region() -> None:
    model = GPT2(SETTINGS)
    streams = RandomStreams(1, (0, 0), torch.device("cpu"))
    streams.attach(model, 1)
    seen: list[torch.Tensor] = []
    core = model.h["0"].attn.core
    real = core.forward
    core.forward = lambda *qkv: (seen.append(real(*qkv)), seen[-1])[1]
    streams.start_iteration(3)
    x = torch.randn(1, 8, 16, requires_grad=True)
    checkpoint(model.h["0"], x, use_reentrant=False).sum().backward()
    assert len(seen) == 2 and torch.equal(*seen)
