from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InputError
from common.settings import DecontaminateSettings
from corpus.text.ngrams import Ngrams, read_ngrams, words
from tests.helpers import prose

SMALL = DecontaminateSettings(min_words=2, max_words=3)


def ngrams(folder: Path, *items: str, settings: DecontaminateSettings = SMALL) -> Ngrams:
    (folder / "set.txt").write_text("\n".join(items))
    return read_ngrams([folder / "set.txt"], settings)


def test_words_are_lower_case_runs_of_letters_digits_and_underscores() -> None:
    assert words("Don't STOP, it's 3.5 été_x!") == ["don", "t", "stop", "it", "s", "3", "5", "été_x"]


def test_an_item_gives_its_13_grams_and_a_shorter_one_itself(tmp_path: Path) -> None:
    long, short, tiny = (prose(1, 200)[:200], "One two three four, five six seven eight!", "too short to be looked for")
    found = ngrams(tmp_path, long, short, tiny, "", settings=DecontaminateSettings())
    count = len(words(long))
    assert len(found.texts) == count - 12 + 1
    assert "one two three four five six seven eight" in found.texts and set(found.tables) == {8, 13}
    assert {" ".join(words(long)[n : n + 13]) for n in range(count - 12)} < set(found.texts)


def test_json_lines_give_every_string_in_them(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(orjson.dumps({"q": "a b", "choices": ["c d", {"e": "f g"}], "n": 1}) + b'\n["h i"]\nj k\n')
    assert read_ngrams([path], SMALL).texts == ["a b", "c d", "f g", "h i", "j k"]
    path.write_bytes(b'{"cut": "off')
    with pytest.raises(InputError, match=r"set.jsonl:1: begins like JSON"):
        read_ngrams([path], SMALL)


def test_a_file_without_items_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no item of 8 words or more"):
        ngrams(tmp_path, "a b c", settings=DecontaminateSettings())


def test_sets_that_share_an_n_gram_both_have_it_and_their_order_changes_no_number(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a b c\nd e f\n")
    (tmp_path / "two.txt").write_text("x y z\na b c\n")
    paths = [tmp_path / "one.txt", tmp_path / "two.txt"]
    first, second = read_ngrams(paths, SMALL), read_ngrams(paths[::-1], SMALL)
    assert first.texts == second.texts == ["a b c", "d e f", "x y z"] and first.digest == second.digest
    assert [first.sets[str(path)].tolist() for path in paths] == [[0, 1], [0, 2]]


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
