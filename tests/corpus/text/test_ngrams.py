from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InputError
from common.settings import DecontaminateSettings
from corpus.text.ngrams import Ngrams, pieces, read_ngrams, words

SMALL = DecontaminateSettings(min_words=2, max_words=3)


def ngrams(folder: Path, *items: str, settings: DecontaminateSettings = SMALL) -> Ngrams:
    (folder / "set.txt").write_text("\n".join(items))
    return read_ngrams([folder / "set.txt"], settings)


def test_an_item_gives_its_13_grams_and_one_of_8_to_13_words_itself(tmp_path: Path) -> None:
    item = [f"w{number}" for number in range(15)]
    texts = ngrams(tmp_path, " ".join(item), *("One, " * n for n in (7, 8)), settings=DecontaminateSettings()).texts
    assert texts == sorted([*(" ".join(item[start : start + 13]) for start in range(3)), "one " * 7 + "one"])
    assert ngrams(tmp_path, " ".join(item[:13]), settings=DecontaminateSettings()).texts == [" ".join(item[:13])]
    for short in (" ".join(item[:7]), "中国的首都是哪个城市呢"):  # 7 words, 11 characters
        with pytest.raises(InputError, match=r"set\.txt"):
            ngrams(tmp_path, short, settings=DecontaminateSettings())
    assert len(ngrams(tmp_path, "中国的首都是哪个城市呢吗", settings=DecontaminateSettings()).texts) == 1


def test_counts_are_of_one_collection_in_one_form_of_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ngrams(tmp_path, "a b c")
    assert first.digest == ngrams(tmp_path, "a b c").digest != ngrams(tmp_path, "a b d").digest
    before = first.digest
    monkeypatch.setattr("corpus.text.ngrams._FORM", "another")
    assert first.digest != before


def test_json_lines_give_every_string_in_them(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(orjson.dumps({"q": "a b", "choices": ["c d", {"e": "f g"}], "n": 1}) + b'\n["h i"]\nj k\n')
    assert read_ngrams([path], SMALL).texts == ["a b", "c d", "f g", "h i", "j k"]
    path.write_bytes(b'{"cut": "off')
    with pytest.raises(InputError, match=r"set.jsonl:1"):
        read_ngrams([path], SMALL)


@settings(max_examples=50)
@given(
    items=st.lists(st.lists(st.sampled_from("abc"), min_size=2, max_size=6).map(" ".join), min_size=1, max_size=5),
    text=st.text("abcABC ,."),
)
def test_the_search_finds_what_a_search_word_by_word_finds(
    tmp_path_factory: pytest.TempPathFactory, items: list[str], text: str
) -> None:
    collection = ngrams(tmp_path_factory.mktemp("set"), *items)
    found = words(text)
    expected = [
        (index, number)
        for index in range(len(found))
        for number, ngram in enumerate(collection.texts)
        if found[index : index + len(ngram.split())] == ngram.split()
    ]
    assert collection.find(found) == sorted(expected)


CUT = DecontaminateSettings(cut_characters=10, min_characters=5, max_pieces=3)


@given(
    text=st.text("ab.!? ", max_size=120),
    spans=st.lists(st.tuples(st.integers(0, 119), st.integers(1, 20)), max_size=5),
)
def test_what_is_kept_is_text_outside_of_every_margin(text: str, spans: list[tuple[int, int]]) -> None:
    within = sorted((start, min(len(text), start + size)) for start, size in spans if start < len(text))
    marked = "".join("#" if any(a <= index < b for a, b in within) else c for index, c in enumerate(text))
    left = pieces(text, within, CUT)
    assert all(len(piece) > 5 for piece in left)
    start = 0
    for piece, found in zip(left, pieces(marked, within, CUT), strict=True):
        assert piece == found and "#" not in found, "nothing of a match is left"
        assert piece in text[start:]
        start = text.index(piece, start) + len(piece)
    if not within:
        assert left == ([text.strip()] if len(text.strip()) > 5 else [])
