import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.settings import DedupSettings
from corpus.dedup.shingles import jaccard, shingles

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
