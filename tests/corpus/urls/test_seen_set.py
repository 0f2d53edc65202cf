import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from corpus.urls.seen_set import SeenSet


@given(st.lists(st.lists(st.integers(0, 40) | st.sampled_from([2**64 - 1, 2**63]), max_size=30), max_size=12))
def test_add_returns_what_a_set_would(batches: list[list[int]]) -> None:
    seen, known = SeenSet(), set[int]()
    for batch in batches:
        expected = []
        for value in batch:
            expected.append(value not in known)
            known.add(value)
        assert seen.add(np.array(batch, dtype=np.uint64)).tolist() == expected


def test_there_are_few_runs_and_each_hash_is_stored_once() -> None:
    seen = SeenSet()
    for start in range(0, 100_000, 1_000):
        seen.add(np.arange(start, start + 2_000, dtype=np.uint64))
    assert sum(map(len, seen._runs)) == 101_000 and len(seen._runs) < 20
