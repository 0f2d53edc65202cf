import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from corpus.text.words import WHOLE, spans, words, worth

# What folds to another length, joins what is before it, is invisible, or is written without spaces.
ODD = (
    "aI i.\n_eé\u0301\u0307\u0323ßſİıΣςﬁﷺ½…™Ａｶﾞㄱㅏ각Gガが"
    "\u3099각中𠮷々。ก้ำ\u17d2ខហិនﬀ\u00ad\u200d\ufeff\ufe0f𝐖😀\U000e0100"
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("café Ångström", unicodedata.normalize("NFD", "café Ångström")),
        ("Straße final", "STRASSE ﬁnal"),
        ("İstanbul DIŞ ılık", "istanbul dış ILIK"),
        ("information", "in\u00adfor\u00admation"),
        ("ガギグ", "ｶﾞｷﾞｸﾞ"),
    ],
)
def test_forms_of_one_text_have_the_same_words(one: str, other: str) -> None:
    assert words(one) == words(other)


def test_words_keep_their_vowel_signs_and_scripts_without_spaces_are_split_into_characters() -> None:
    assert words("हिन्दी में") == ["हिन्दी", "में"]
    assert words("Python3で書く。") == ["python3", "で", "書", "く"]
    assert [text for text in ("ที่", "นี่", "๒") if text not in words("ที่นี่ ๒")] == [] and len(words("មួយ")) == 2
    values = [worth(word) for word in ("one", "été", "हिन्दी", "한국어", "中", "𠮷", "か", "ก")]
    assert values == [*[WHOLE] * 4, *[WHOLE * 2 // 3] * 2, *[WHOLE * 2 // 5] * 2]


@example("0\U000e01f0²")
@given(st.text(st.one_of(st.sampled_from(ODD), st.characters(exclude_categories=("Cs",))), max_size=12))
def test_every_word_stands_where_its_span_says(text: str) -> None:
    found, where = words(text), spans(text)
    assert all(0 <= start < end <= len(text) for start, end in where) and where == sorted(where)
    for word, (start, end) in zip(found, where, strict=True):
        assert word in words(text[start:end]), "a span holds its word, whatever stands around it"
