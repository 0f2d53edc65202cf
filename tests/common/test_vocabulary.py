"""Vocabularies with added tokens, as transformers 4 and 5 save them: the same ids, and the same
number of tokens.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken, AutoTokenizer, GPT2Tokenizer

from common.errors import InputError
from common.tokenizer import Tokenizer
from common.vocabulary import END_OF_TEXT, Vocabulary, token_count
from training.huggingface.tokenizer import read_tokenizer, write_tokenizer

PLAIN = Vocabulary.of_merges(["i n", "Ġ t", "h e", "Ġt he", "e r"])
FIRST = Vocabulary(
    PLAIN.merges, {token: (number + 1) % PLAIN.size for token, number in PLAIN.ids.items()}
)  # the course
WITHOUT = Vocabulary(PLAIN.merges, {token: number for token, number in PLAIN.ids.items() if token != END_OF_TEXT})
TEXTS = [
    *(
        "",
        "plain text in there",
        "hello <usr> there<sep>",
        "<sep><usr>",
        "a<usr>b <usr>",
        "the\n <mask> \n in",
        "<mask>",
    ),
    *("xword word wordy", "[PAD][PAD]", " <sep>  <sep>\n", "<usr ><us", "é<sep>日本", "Word in <usr>word"),
]


def save(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def flags(content: str, **more: bool) -> dict[str, Any]:
    defaults = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **defaults, **more}


def old(folder: Path, vocabulary: Vocabulary = PLAIN, **config: Any) -> None:
    """The files that transformers 4 saved for the slow tokenizer."""
    save(folder, "vocab.json", vocabulary.ids)
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *vocabulary.merges, ""]))
    save(folder, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **config})


def new(folder: Path, *tokens: Any, vocabulary: Vocabulary = PLAIN, **special: Any) -> None:
    """What transformers saves today."""
    merges = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    tokenizer = GPT2Tokenizer(vocab=dict(vocabulary.ids), merges=merges, **special)
    tokenizer.add_tokens(list(tokens))
    tokenizer.save_pretrained(folder)


def special_token_names(folder: Path) -> None:
    old(folder, pad_token="[PAD]")
    names = {"additional_special_tokens": ["<sep>", "<usr>"], "eos_token": flags(END_OF_TEXT)}
    save(folder, "special_tokens_map.json", names)


def two_files(folder: Path) -> None:
    old(folder)
    save(folder, "added_tokens.json", {"<sep>": PLAIN.size, "<usr>": PLAIN.size + 1})
    save(folder, "special_tokens_map.json", {"additional_special_tokens": ["<usr>"]})


SIZE = PLAIN.size
FORMS: dict[str, Callable[[Path], None]] = {
    "5, special": lambda folder: new(folder, AddedToken("<sep>", special=True), AddedToken("<usr>", special=True)),
    "5, words": lambda folder: new(folder, "<usr>", AddedToken("word", single_word=True)),
    "5, white space": lambda folder: new(
        folder, AddedToken("<sep>", rstrip=True), AddedToken("<mask>", lstrip=True, rstrip=True, special=True)
    ),
    "5, padding": lambda folder: new(folder, pad_token="[PAD]"),
    "5, normalized": lambda folder: new(
        folder, AddedToken("<usr>", normalized=True), AddedToken("日", normalized=True)
    ),
    "5, none": new,
    "5, end of text added": lambda folder: new(folder, "<usr>", vocabulary=WITHOUT),
    "5, end of text first": lambda folder: new(folder, "<usr>", vocabulary=FIRST),
    "4, decoder": lambda folder: old(
        folder, added_tokens_decoder={SIZE: flags("<sep>"), SIZE + 1: flags("<usr>", special=False, normalized=True)}
    ),
    "4, decoder, white space": lambda folder: old(
        folder,
        added_tokens_decoder={
            SIZE - 1: flags(END_OF_TEXT),
            SIZE: flags("<mask>", lstrip=True),
            SIZE + 1: flags("<sep>"),
        },
    ),
    "4, added_tokens.json": two_files,
    "4, names": special_token_names,
    "4, end of text first": lambda folder: old(folder, FIRST),
}


@pytest.mark.parametrize("form", FORMS)
def test_added_tokens_have_the_ids_of_transformers_in_every_form(tmp_path: Path, form: str) -> None:
    FORMS[form](tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), read_tokenizer(tmp_path)
    assert ours is not None and ours.vocab_size == token_count(tmp_path) == len(theirs)
    assert ours.end_of_text == theirs.convert_tokens_to_ids(END_OF_TEXT)
    written = tmp_path / "written"
    written.mkdir()
    write_tokenizer(written, ours, 64)
    again, reread = AutoTokenizer.from_pretrained(written), read_tokenizer(written)
    assert reread is not None and reread.vocabulary == ours.vocabulary
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).tolist() == again(text)["input_ids"] == ids, text
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    flat, lengths = ours.encode_batch(TEXTS)
    assert flat.tolist() == [number for text in TEXTS for number in theirs(text)["input_ids"]]
    assert lengths.tolist() == [len(theirs(text)["input_ids"]) for text in TEXTS]


def test_end_of_text_in_a_text_stays_text_and_has_no_bytes(tmp_path: Path) -> None:
    new(tmp_path, "<usr>", vocabulary=FIRST)
    ours = read_tokenizer(tmp_path)
    assert ours is not None and ours.end_of_text == 0
    ids = ours.encode(f"<usr>{END_OF_TEXT}").tolist()
    assert ids[0] == PLAIN.size and 0 not in ids
    assert ours.byte_lengths[0] == 0 and ours.byte_lengths[ids].sum() == len(f"<usr>{END_OF_TEXT}")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: save(folder, "added_tokens.json", {"<usr>": 7}), "have the same id"),
        (lambda folder: save(folder, "vocab.json", {t: n + 1 for t, n in PLAIN.ids.items()}), "no token has the id 0"),
        (
            lambda folder: save(folder, "added_tokens.json", {"<usr>": 10**15}),
            f"no token .* id {SIZE + 4096}",
        ),
        (
            lambda folder: save(folder, "added_tokens.json", {"in": 3}),
            r"added_tokens\.json: token 'in' has id 3, but 256",
        ),
        (lambda folder: save(folder, "added_tokens.json", ["<usr>"]), r"added_tokens\.json: .* form"),
        (lambda folder: old(folder, add_prefix_space=True), r"tokenizer_config\.json: .*add_prefix_space"),
        (lambda folder: save(folder, "vocab.json", {**PLAIN.ids, "odd": SIZE}), "'odd' is no byte"),
        (lambda folder: save(folder, "vocab.json", {"a": "b"}), r"vocab\.json: not a vocabulary"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_one_line(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    old(tmp_path)
    spoil(tmp_path)
    ours = read_tokenizer(tmp_path)
    assert ours is not None
    with pytest.raises(InputError, match=says) as error:
        ours.encode("a")
    assert "\n" not in str(error.value)


def test_the_hash_is_that_of_the_merges_where_they_give_all_ids(tmp_path: Path) -> None:
    assert Tokenizer().vocabulary.hash == "04e3597d7996f292"  # existing corpora of GPT-2's have it
    hashes = set()
    for form in FORMS:
        (folder := tmp_path / form).mkdir()
        FORMS[form](folder)
        found = read_tokenizer(folder)
        assert found is not None
        hashes.add(found.vocabulary.hash)
    assert PLAIN.hash in hashes and len(hashes) > 8
