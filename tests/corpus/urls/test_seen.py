import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from corpus.urls.seen import Seen


@given(st.lists(st.lists(st.integers(0, 40) | st.sampled_from([2**64 - 1, 2**63]), max_size=30), max_size=12))
def test_first_occurrences_are_those_of_a_set(batches: list[list[int]]) -> None:
    seen, known = Seen(), set[int]()
    for batch in batches:
        expected = []
        for value in batch:
            expected.append(value not in known)
            known.add(value)
        assert seen.first(np.array(batch, dtype=np.uint64)).tolist() == expected


def test_the_runs_stay_few_and_hold_each_hash_once() -> None:
    seen = Seen()
    for start in range(0, 100_000, 1_000):
        seen.first(np.arange(start, start + 2_000, dtype=np.uint64))
    assert sum(map(len, seen._runs)) == 101_000 and len(seen._runs) < 20
