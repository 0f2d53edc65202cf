"""Batches: shapes, and the options around end-of-text."""

from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.dataset.batches import BatchForm, read_batch
from training.dataset.corpus import Corpus, Samples
from training.model import IGNORED

END = 99


def samples_of(tokens: list[int], seq_len: int) -> Samples:
    return Samples(Corpus.in_memory(Path("c"), [np.array(tokens)]), range(1), seq_len)


def test_inputs_and_targets_are_one_token_apart() -> None:
    batch = read_batch(samples_of(list(range(40)), 8), BatchForm(END), [0, 2])
    assert batch.tokens.tolist() == [list(range(8)), list(range(16, 24))]
    assert batch.targets.tolist() == [list(range(1, 9)), list(range(17, 25))]
    assert batch.positions is None and batch.counted == 16
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64


@given(st.lists(st.sampled_from([1, 2, END]), min_size=17, max_size=17), st.booleans())
def test_the_options_equal_a_loop_over_the_tokens(tokens: list[int], mask: bool) -> None:
    """End-of-text after end-of-text is never a target."""
    batch = read_batch(samples_of(tokens, 8), BatchForm(END, reset_position_ids=True, eod_mask_loss=mask), [0, 1])
    for row in range(2):
        position, positions, targets = 0, [], []
        for place in range(8 * row, 8 * row + 8):
            positions.append(position)
            position = 0 if tokens[place] == END else position + 1
            last = tokens[place] == END and (mask or tokens[place + 1] == END)
            targets.append(IGNORED if last else tokens[place + 1])
        assert batch.positions is not None and batch.positions[row].tolist() == positions
        assert batch.targets[row].tolist() == targets
    assert batch.counted == int((batch.targets != IGNORED).sum())
