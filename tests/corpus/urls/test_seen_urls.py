import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus.urls.rules import SeenUrls


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 40) | st.sampled_from([2**64 - 1, 2**63]), max_size=30), max_size=12))
def test_add_returns_what_a_set_would(batches: list[list[int]]) -> None:
    seen, known = SeenUrls(), set[int]()
    for batch in batches:
        expected = []
        for value in batch:
            expected.append(value not in known)
            known.add(value)
        assert seen.add(np.array(batch, dtype=np.uint64)).tolist() == expected
