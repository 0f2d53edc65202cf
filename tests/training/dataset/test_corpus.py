"""The data order has every token once per epoch, in every layout; errors say what to change."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, InputError
from tests.training.helpers import byte_documents, write_corpus
from training.dataset.corpus import Corpus, Samples, permutation, split_documents


def corpus_of(lengths: list[int]) -> Corpus:
    """Documents of these lengths with the tokens 0, 1, 2, … over the whole corpus."""
    edges = np.concatenate([[0], np.cumsum(lengths)])
    return Corpus.in_memory(Path("corpus"), [np.arange(a, b) for a, b in pairwise(edges)])


lengths_with_samples = st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 8)


@given(lengths=lengths_with_samples, seq_len=st.integers(1, 7), seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_an_epoch_predicts_every_token_once_except_the_first_and_a_short_tail(
    lengths: list[int], seq_len: int, seed: int, epoch: int
) -> None:
    samples = Samples(corpus_of(lengths), range(len(lengths)), seq_len, seed)
    count = samples.per_epoch
    assert count == (sum(lengths) - 1) // seq_len
    seen = [samples.sample(epoch * count + number) for number in range(count)]
    assert all(len(sample) == seq_len + 1 for sample in seen)
    targets = np.concatenate([sample[1:] for sample in seen])
    assert len(set(targets.tolist())) == count * seq_len
    # Concatenated in the order of their positions, the samples are complete documents.
    order = samples.make_epoch(epoch)
    places = np.argsort([order.samples[number] for number in range(count)])
    stream = np.concatenate([seen[places[0]][:1], *(seen[place][1:] for place in places)])
    documents = [
        samples.corpus.tokens[samples.corpus.starts[d] :][: samples.corpus.lengths[d]] for d in order.documents
    ]
    assert np.array_equal(stream, np.concatenate(documents)[: len(stream)])


@given(lengths=lengths_with_samples, seed=st.integers(0, 99), start=st.integers(0, 200))
def test_a_sample_depends_only_on_its_number(lengths: list[int], seed: int, start: int) -> None:
    corpus = corpus_of(lengths)
    straight = Samples(corpus, range(len(lengths)), 4, seed)
    with ThreadPoolExecutor(8) as pool:
        course = list(pool.map(straight.sample, range(start + 3)))
    resumed = Samples(corpus, range(len(lengths)), 4, seed)
    for number in (start + 2, start):
        assert np.array_equal(resumed.sample(number), course[number])


def test_the_order_is_what_existing_runs_expect() -> None:
    samples = Samples(corpus_of([7, 3, 0, 9, 11]), range(5), 4, seed=1234)
    assert [samples.sample(number).tolist() for number in (0, 7, 14)] == [
        [22, 23, 24, 25, 26],
        [25, 26, 27, 28, 29],
        [1, 2, 3, 4, 5],
    ]
    assert [len(part) for part in split_documents("949,50,1", 400).values()] == [379, 20, 1]


@given(
    documents=st.integers(1, 500), shares=st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 1000))
)
def test_parts_are_contiguous_and_cover_all_documents(documents: int, shares: tuple[int, int, int]) -> None:
    split = ",".join(map(str, shares))
    if documents < sum(share > 0 for share in shares):
        with pytest.raises(ConfigError, match=f"{split} has . parts, but p has {documents} doc"):
            split_documents(split, documents, "p")
        return
    parts = split_documents(split, documents)
    assert [parts[name].start for name in ("valid", "test")] == [parts[name].stop for name in ("train", "valid")]
    assert parts["train"].start == 0 and parts["test"].stop == documents
    assert [bool(part) for part in parts.values()] == [True, *(share > 0 for share in shares[1:])]


def test_permutations_are_uniform_and_are_what_existing_runs_expect() -> None:
    assert permutation(8, 1234, 0, 1).tolist() == [7, 3, 0, 2, 4, 6, 5, 1]
    counts = np.zeros((5, 5), int)
    for seed in range(2000):
        counts[np.arange(5), permutation(5, seed)] += 1
    assert (counts.sum(0) == 2000).all() and abs(counts - 400).max() < 90  # five standard deviations


def test_empty_documents_are_read_and_a_corpus_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    documents = byte_documents(5)
    write_corpus(tmp_path / "c", [documents[0], np.empty(0, np.uint16), *documents[1:]])
    corpus, whole = Corpus.open(tmp_path / "c"), np.concatenate(documents)
    assert np.array_equal(Samples(corpus, range(6), 16).sample(3), whole[48:65])
    Samples(corpus, range(6), len(whole) - 1).require_one("train")
    with pytest.raises(InputError, match=f"{len(whole)} tokens in 6 documents.* = {len(whole) + 1}"):
        Samples(corpus, range(6), len(whole)).require_one("train")


def test_a_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "ours", byte_documents(3))
    with pytest.raises(InputError, match="257, but key is 300"):
        Corpus.open(tmp_path / "ours").check_vocabulary(300, "key")
    damaged = byte_documents(3)
    damaged[1][5] = 3000
    write_corpus(tmp_path / "ours", damaged)
    corpus = Corpus.open(tmp_path / "ours")
    corpus.check_vocabulary(257, "key")
    with pytest.raises(InputError, match="token id 3000"):
        Samples(corpus, range(3), 1000).tail()
    write_corpus(tmp_path / "theirs", byte_documents(3), vocab_size=None)
    Corpus.open(tmp_path / "theirs").check_vocabulary(257, "key")
    with pytest.raises(InputError, match="token id 256, but key is 256"):
        Corpus.open(tmp_path / "theirs").check_vocabulary(256, "key")
