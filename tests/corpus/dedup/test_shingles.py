import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.settings import DedupSettings
from corpus.dedup.shingles import jaccard, normalised, shingles
from corpus.dedup.signatures import key_of
from corpus.text.words import words

CHARACTERS = DedupSettings()
WORDS = DedupSettings(shingle_words=3)


def text_shingles(text: str, settings: DedupSettings) -> set[object]:
    """The definition: every n-gram, or the whole text if it is shorter than one."""
    items = (words(text) or [text]) if settings.shingle_words else list(normalised(text))
    length = settings.shingle_words or settings.shingle_characters
    return {tuple(items[start : start + length]) for start in range(max(1, len(items) - length + 1))}


def similarity(first: str, second: str, settings: DedupSettings) -> float:
    return jaccard(*(shingles(normalised(text), settings) for text in (first, second)))


@given(st.integers(0, 1 << 22), st.integers(0, 1 << 22))
def test_keys_put_the_longest_first_to_one_in_32768(one: int, other: int) -> None:
    longer, shorter = (key_of("id", "x" * size) for size in sorted((one, other), reverse=True))
    assert longer < shorter or abs(one - other) <= max(one, other) / 16384
    assert key_of("id", "x" * 10) != key_of("other", "x" * 10) != key_of("other", "y" * 10)


def test_neither_case_nor_white_space_nor_invisible_characters_make_texts_different() -> None:
    for text, other in (
        ("A soft\u00adly  wrapped\n\tTEXT\u200b.", "a softly wrapped text."),
        ("\ufb01ne \uff28\uff21\uff2c\uff26 Stra\u00dfe", "fine half strasse"),
        ("e\u0301t\u00e9 \ufeffco\u2060op", "\u00e9te\u0301 coop"),
    ):
        assert normalised(text) == normalised(other) and similarity(text, other, CHARACTERS) == 1
    assert normalised(" \n") == "" and normalised("a b") != normalised("ab")


@given(st.text())
def test_a_normalised_text_is_its_own_normalised_form(text: str) -> None:
    once = normalised(text)
    assert normalised(once) == once


def test_words_leave_out_punctuation_and_chinese_is_compared_by_character() -> None:
    rules = DedupSettings(shingle_words=2)
    assert similarity("One, two; (three)!", "one two three", rules) == 1
    assert 0 < similarity("\u6211\u4eec\u5728\u5317\u4eac\u3002", "\u6211\u4eec\u5728\u4e0a\u6d77", rules) < 1
    assert similarity("...", "---", rules) == 0, "texts without words are compared as they are"


@pytest.mark.parametrize("settings", [CHARACTERS, WORDS, DedupSettings(shingle_characters=1)])
@hypothesis.settings(max_examples=50)
@given(st.text(), st.text())
def test_the_similarity_is_that_of_the_sets_of_n_grams(settings: DedupSettings, one: str, other: str) -> None:
    for first, second in ((one, other), (one + other, other), (one, one)):
        a, b = text_shingles(first, settings), text_shingles(second, settings)
        assert similarity(first, second, settings) == len(a & b) / len(a | b)
