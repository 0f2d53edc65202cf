"""From samples to batches: shapes, the options around end-of-text, threads that read ahead."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.batches import BatchForm, prefetched, read_batch
from training.data import Corpus, Samples
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


def test_positions_begin_again_behind_end_of_text_and_its_loss_is_left_out() -> None:
    tokens = [1, 2, END, 3, END, END, 4, 5, 6]
    batch = read_batch(samples_of(tokens, 8), BatchForm(END, reset_position_ids=True, eod_mask_loss=True), [0])
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert batch.targets.tolist() == [[2, END, IGNORED, END, IGNORED, IGNORED, 5, 6]]
    assert batch.counted == 5


@given(st.lists(st.sampled_from([1, 2, END]), min_size=17, max_size=17))
def test_the_options_are_those_of_a_loop_over_the_tokens(tokens: list[int]) -> None:
    batch = read_batch(samples_of(tokens, 8), BatchForm(END, reset_position_ids=True, eod_mask_loss=True), [0, 1])
    for row in range(2):
        position, positions, targets = 0, [], []
        for place in range(8 * row, 8 * row + 8):
            positions.append(position)
            position = 0 if tokens[place] == END else position + 1
            targets.append(IGNORED if tokens[place] == END else tokens[place + 1])
        assert batch.positions is not None and batch.positions[row].tolist() == positions
        assert batch.targets[row].tolist() == targets
    assert batch.counted == int((batch.targets != IGNORED).sum())


def test_results_come_in_order_and_are_made_ahead_of_their_use() -> None:
    asked: list[int] = []
    gate = threading.Event()

    def slow(number: int) -> int:
        asked.append(number)
        if number == 0:
            gate.wait(60)  # the others overtake it
        return number

    with closing(prefetched(slow, count(), threads=2, ahead=5)) as results:
        threading.Thread(target=lambda: (time.sleep(0.05), gate.set())).start()
        assert next(results) == 0
        assert [next(results) for _ in range(20)] == list(range(1, 21))
        for _ in range(6000):
            if max(asked) == 25:  # 5 ahead of what was taken
                break
            time.sleep(0.01)
    assert max(asked) == 25
    assert list(prefetched(str, range(7), threads=3, ahead=9)) == list("0123456")


def test_an_error_is_raised_where_its_result_is_due_and_the_threads_end() -> None:
    def fails(number: int) -> int:
        return 1 // (3 - number)

    results = prefetched(fails, count(), threads=2, ahead=4)
    assert [next(results) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


def test_an_iterator_that_is_closed_stops_its_threads() -> None:
    def numbers() -> Iterator[int]:
        yield from range(10)

    results = prefetched(str, numbers(), threads=3, ahead=4)
    next(results)
    results.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


@pytest.mark.gpu
def test_pinned_batches_reach_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    form = BatchForm(END, reset_position_ids=True, pinned=True)
    batch = read_batch(samples_of(list(range(40)), 8), form, [0, 2])
    assert batch.tokens.is_pinned() and batch.positions is not None and batch.positions.is_pinned()
    assert batch.to(torch.device("cuda")).tokens.tolist() == batch.tokens.tolist()
