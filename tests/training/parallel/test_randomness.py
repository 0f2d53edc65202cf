"""Dropout's streams: equal outside split regions, different inside, and the same after any restart."""

import pytest
import torch

from common.settings import ModelSettings
from training.model import GPT2, AttentionCore
from training.parallel.randomness import RandomStreams, rank_uniform

SETTINGS = ModelSettings(n_layer=2, n_head=2, n_embd=16, seq_len=8, vocab_size=32, dropout=0.5)
ON_EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def draws(
    data_rank: int, tensor_rank: int, iteration: int, seed: int = 1, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers drawn inside split regions and outside of them by one rank."""
    RandomStreams(seed, (0, data_rank)).start_iteration(iteration)
    like = torch.zeros(4, device=device)
    inside = [rank_uniform(like, tensor_rank)]
    torch.rand(3, device=device)
    inside.append(rank_uniform(like, tensor_rank))
    return torch.cat(inside), torch.rand(4, device=device)


@ON_EVERY_DEVICE
def test_tensor_ranks_share_the_outside_and_differ_inside(device: str) -> None:
    (inside_0, outside_0), (inside_1, outside_1) = draws(0, 0, 5, device=device), draws(0, 1, 5, device=device)
    assert torch.equal(outside_0, outside_1)
    assert len(torch.cat([inside_0, inside_1, outside_0]).unique()) == 20  # nothing is drawn twice


def test_numbers_depend_on_data_rank_iteration_and_seed_and_not_on_earlier_draws() -> None:
    first = draws(0, 0, 5)
    for other in (draws(1, 0, 5), draws(0, 0, 6), draws(0, 0, 5, seed=2)):
        assert not torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])
    torch.rand(1000)
    assert all(map(torch.equal, first, draws(0, 0, 5)))


@ON_EVERY_DEVICE
def test_attention_drops_the_configured_share_and_keeps_the_mean(device: str) -> None:
    model, streams = GPT2(SETTINGS).to(device), RandomStreams(1, (0, 0))
    streams.attach(model, 1)
    streams.start_iteration(3)
    core = model.h["0"].attn.core
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(64, 2, 8, 8, generator=generator).to(device) for _ in range(3))
    expected = AttentionCore(0.0)(q, k, v)
    found = torch.stack([core(q, k, v) for _ in range(64)])
    assert (found[:, :, :, 0] == 0).all(dim=-1).float().mean() == pytest.approx(0.5, abs=0.03)  # attends to itself only
    assert torch.allclose(found.mean(dim=0).mean(), expected.mean(), atol=0.01)
    assert torch.allclose(core.eval()(q, k, v), expected, atol=1e-5)
