import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from corpus.text.words import WHOLE, spans, words, worth

# What folds to another length, joins what is before it, is invisible, or is written without spaces.
ODD = (
    "aI i.\n_eé\u0301\u0307\u0323ßſİıΣςﬁﷺ½…™Ａｶﾞㄱㅏ각Gガが"
    "\u3099각中𠮷々。ก้ำ\u17d2ខហिनﬀ\u00ad\u200d\ufeff\ufe0f𝐖😀\U000e0100"
)


def stood(text: str) -> list[str]:
    return [text[start:end] for start, end in spans(text)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("café Ångström", unicodedata.normalize("NFD", "café Ångström")),
        ("Which river 2020", "Ｗｈｉｃｈ　ｒｉｖｅｒ　２０２０"),
        ("final office", "ﬁnal oﬃce"),
        ("Straße GROSS", "STRASSE groß"),
        ("İstanbul DIŞ ılık", "istanbul dış ILIK"),
        ("ΟΔΟΣ", "οδος"),
        ("information", "in\u00adfor\u00admation"),
        ("ガギグ", "ｶﾞｷﾞｸﾞ"),
        ("한국어 문서", unicodedata.normalize("NFD", "한국어 문서")),
        ("20 °C", "20 ℃"),
    ],
)
def test_forms_of_one_text_have_the_same_words(one: str, other: str) -> None:
    assert words(one) == words(other)
    assert words(one.upper() if one.isascii() else one) == words(one)


def test_words_keep_their_vowel_signs_and_scripts_without_spaces_are_split_into_characters() -> None:
    assert words("हिन्दी में") == ["हिन्दी", "में"]
    assert words("Python3で書く。") == ["python3", "で", "書", "く"]
    assert stood("ที่นี่ ๒") == ["ที่", "นี่", "๒"] and len(words("មួយ")) == 2 and len(words("ကောင်း")) == 2
    assert [worth(word) for word in ("one", "été", "हिन्दी", "한국어", "中", "𠮷", "か", "ก")] == [
        *[WHOLE] * 4,
        *[WHOLE * 2 // 3] * 2,
        *[WHOLE * 2 // 5] * 2,
    ]


@given(st.text(st.characters(codec="ascii")))
def test_words_of_english_are_lower_case_runs_of_letters(text: str) -> None:
    assert words(text) == [word.lower() for word in re.findall(r"\w+", text)]
    assert words(f"“{text}” — Zoë") == [*words(text), "zoë"]
    assert spans(text) == [match.span() for match in re.finditer(r"\w+", text)]


@example("0\U000e01f0²")
@given(st.text(st.one_of(st.sampled_from(ODD), st.characters(exclude_categories=("Cs",))), max_size=12))
def test_every_word_stands_where_its_span_says(text: str) -> None:
    found, where = words(text), spans(text)
    assert len(found) == len(where)
    assert all(0 <= start < end <= len(text) for start, end in where)
    assert [span for pair in where for span in pair[:1]] == sorted(start for start, _ in where)
    for word, (start, end) in zip(found, where, strict=True):
        assert word in words(text[start:end]), "a span holds its word, whatever stands around it"
