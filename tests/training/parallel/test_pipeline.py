"""Which layers a stage holds, how long the pipeline idles, and how the vocabulary is padded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.parallel.sizes import bubble_share, padded_vocab_size, stage_layers


@given(st.integers(1, 60), st.integers(1, 12))
def test_layers_are_spread_evenly_and_in_order(n_layer: int, stages: int) -> None:
    layers = stage_layers(n_layer, stages)
    assert [layer for stage in layers for layer in stage] == list(range(n_layer))
    sizes = [len(stage) for stage in layers]
    assert max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)


def test_the_bubble_is_as_in_the_papers() -> None:
    assert [bubble_share(*sizes) for sizes in ((1, 1, 8), (4, 1, 8), (4, 2, 8))] == pytest.approx([0, 3 / 11, 3 / 19])


def test_the_vocabulary_is_padded_to_a_multiple_of_128_times_tp() -> None:
    assert [padded_vocab_size(50257, tensor) for tensor in (1, 2, 4, 8)] == [50304, 50432, 50688, 51200]
    assert [padded_vocab_size(size, 1) for size in (128, 129)] == [128, 256]
