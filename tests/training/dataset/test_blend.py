"""A blend is exact to one sample at every prefix, and the same in every layout."""

from itertools import islice
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from training.dataset.batches import micro_batches
from training.dataset.blend import Blend, integer_weights, schedule
from training.dataset.corpus import Corpus, Samples


def samples_of(tokens: int, number: int = 0) -> Samples:
    """One document whose token k is 1,000 x number + k, with seq_len 1."""
    return Samples(Corpus.in_memory(Path(f"c{number}"), [np.arange(tokens) + 1000 * number]), range(1), 1)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_every_prefix_of_a_period_is_exact_to_one_sample(weights: list[int]) -> None:
    chosen, period = schedule(weights), sum(weights)
    assert np.bincount(chosen, minlength=len(weights)).tolist() == weights
    for corpus, weight in enumerate(weights):
        lag = np.cumsum(chosen == corpus) * period - np.arange(1, period + 1) * weight
        assert abs(lag).max() < period  # of one sample


@given(st.lists(st.integers(1, 40), min_size=2, max_size=5), st.integers(0, 300))
@settings(max_examples=30)
def test_the_stream_takes_each_corpus_samples_in_order_from_any_start(weights: list[int], start: int) -> None:
    blend = Blend([samples_of(3 + 9 * number, number) for number in range(len(weights))], weights)
    counts = [blend.taken(start, corpus) for corpus in range(len(weights))]
    assert sum(counts) == start
    for number in range(start, start + 20):
        tokens = blend.sample(number)
        corpus = int(tokens[0]) // 1000
        assert np.array_equal(tokens, blend.parts[corpus].sample(counts[corpus]))
        counts[corpus] += 1
    assert counts == [blend.taken(start + 20, corpus) for corpus in range(len(weights))]


def test_weights_become_the_smallest_integers_in_their_ratio() -> None:
    assert integer_weights([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert integer_weights([30, 70]) == [3, 7]
    whole = integer_weights([1e-9, 0.1234, 1.0])
    assert sum(whole) == 2**20 and min(whole) > 0
    assert schedule([2, 1]).tolist() == [0, 1, 0]


@given(consumed=st.integers(0, 1000), micro=st.integers(1, 4))
@settings(max_examples=30)
def test_global_batches_are_the_same_in_every_layout_and_after_a_change(consumed: int, micro: int) -> None:
    batch = 8 * micro
    blend = Blend([samples_of(30, 1), samples_of(50, 2)], [0.3, 0.7])

    def step(data: int, consumed: int, number: int) -> list[list[int]]:
        """The samples of global batch `number` of a run from `consumed` on, by index."""
        accumulation = batch // (micro * data)
        ranges = [
            list(islice(micro_batches(consumed, micro, rank, data), accumulation * number, accumulation * (number + 1)))
            for rank in range(data)
        ]
        return [blend.sample(n).tolist() for place in range(accumulation) for rank in ranges for n in rank[place]]

    straight = [step(1, consumed, number) for number in range(3)]
    for data in (1, 2, 4, 8):
        assert [step(data, consumed, number) for number in range(3)] == straight
    # stopped after one batch on two ranks, resumed on four
    assert [step(2, consumed, 0), step(4, consumed + batch, 0), step(4, consumed + batch, 1)] == straight
