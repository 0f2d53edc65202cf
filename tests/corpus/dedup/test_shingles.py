import hypothesis
import numpy as np
import pytest
from datasketch import MinHash
from hypothesis import given
from hypothesis import strategies as st

from common.settings import DedupSettings
from corpus.dedup.shingles import MinHasher, band_hashes, codes, jaccard, shingle_hash, shingles
from tests.helpers import prose

CHARACTERS = DedupSettings()
WORDS = DedupSettings(shingle_words=3)


def text_shingles(text: str, settings: DedupSettings) -> set[object]:
    """The definition: every n-gram, or the whole text if it is shorter than one."""
    items = text.split() if settings.shingle_words else list(text)
    length = settings.shingle_words or settings.shingle_characters
    return {tuple(items[start : start + length]) for start in range(max(1, len(items) - length + 1))}


@pytest.mark.parametrize("settings", [CHARACTERS, WORDS, DedupSettings(shingle_characters=1)])
@hypothesis.settings(max_examples=50)
@given(st.text(), st.text())
def test_the_similarity_is_that_of_the_sets_of_n_grams(settings: DedupSettings, one: str, other: str) -> None:
    for first, second in ((one, other), (one + other, other), (one, one)):
        a, b = text_shingles(first, settings), text_shingles(second, settings)
        assert jaccard(shingles(first, settings), shingles(second, settings)) == len(a & b) / len(a | b)


@pytest.mark.parametrize("text", ["", "12345", "żółć “quoted” 😀 " * 9, prose(4) * 150], ids=len)
def test_signatures_are_those_of_datasketch(text: str) -> None:
    settings = DedupSettings(bands=4, rows=3, seed=7)
    hashes = shingle_hash(codes(text, settings))
    theirs = MinHash(12, seed=7, scheme="affine32", hashfunc=lambda number: number)
    theirs.update_batch([int(value) for value in hashes])
    assert np.array_equal(MinHasher(settings).signature(text), theirs.hashvalues)


def test_equal_bands_and_only_these_have_equal_hashes() -> None:
    settings = DedupSettings(bands=2, rows=3)
    signatures = np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 6, 5, 4], [3, 2, 1, 4, 5, 6]], dtype=np.uint32)
    first, second, third = band_hashes(signatures, settings)
    assert first[0] == second[0] != third[0]
    assert first[1] == third[1] != second[1]
