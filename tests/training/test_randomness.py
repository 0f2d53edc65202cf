"""Dropout's streams: equal outside split regions, different inside, and the same after any restart."""

import torch

from common.settings import ModelSettings
from training.model import GPT2
from training.randomness import RandomStreams

SETTINGS = ModelSettings(n_layer=1, n_head=2, n_embd=16, seq_len=8, vocab_size=32, dropout=0.5)
CPU = torch.device("cpu")


def draws(data_rank: int, tensor_rank: int, iteration: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers drawn inside the attention core and outside of it, in one forward pass of one rank."""
    model = GPT2(SETTINGS)
    streams = RandomStreams(seed, data_rank, tensor_rank, CPU)
    streams.attach(model)
    inside: list[torch.Tensor] = []
    core = model.h[0].attn.core
    core.forward = lambda q, k, v: inside.append(torch.rand(4)) or v  # type: ignore[func-returns-value]
    streams.start_iteration(iteration)
    model(torch.zeros(1, 8, dtype=torch.long))
    return inside[0], torch.rand(4)


def test_tensor_ranks_share_the_outside_and_differ_inside() -> None:
    (inside_0, outside_0), (inside_1, outside_1) = draws(0, 0, 5), draws(0, 1, 5)
    assert torch.equal(outside_0, outside_1)
    assert not torch.equal(inside_0, inside_1)


def test_data_ranks_iterations_and_seeds_all_differ() -> None:
    first = draws(0, 0, 5)
    for other in (draws(1, 0, 5), draws(0, 0, 6), draws(0, 0, 5, seed=2)):
        assert not torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])


def test_numbers_depend_on_the_iteration_alone_not_on_what_was_drawn_before() -> None:
    first = draws(0, 1, 5)
    torch.rand(1000)
    again = draws(0, 1, 5)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
