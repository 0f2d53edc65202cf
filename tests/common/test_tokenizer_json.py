"""tokenizer.json: written as by `transformers`, read if it is GPT-2's byte-level BPE, refused otherwise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Peer
from transformers import GPT2Tokenizer

from common.errors import InputError
from common.tokenizer import CHARACTERS, END_OF_TEXT, Tokenizer, Vocabulary, VocabularyFiles, to_json, vocabulary_files

ODD = [
    *("Naïve café — 3.14", " leading and trailing ", "\n\n\ttabs  and   runs\r\n", "I'll we've they'RE 'quoted'"),
    *("日本語 العربية עברית 👩‍👩‍👧‍👦 \u200b\ufeff\x00\x7f", "x" * 300, ""),
]


def test_what_we_write_and_what_transformers_writes_mean_the_same(tmp_path: Path) -> None:
    ours = Tokenizer()
    raw = to_json(ours.vocabulary)
    theirs = Peer.from_str(json.dumps(raw))
    assert theirs.token_to_id("<|endoftext|>") == 50256 and theirs.get_vocab_size() == 50257
    assert theirs.encode("<|endoftext|>").ids == [50256]  # as in the file that transformers writes
    assert isinstance(ours.files, VocabularyFiles)
    GPT2Tokenizer(str(ours.files.encoder_json), str(ours.files.vocab_bpe)).save_pretrained(tmp_path)
    read, saved = Tokenizer(vocabulary_files(tmp_path / "tokenizer.json")), Peer.from_file(f"{tmp_path}/tokenizer.json")
    assert read.vocabulary == ours.vocabulary
    for text in ODD:
        ids = ours.encode(text).tolist()
        assert theirs.encode(text).ids == saved.encode(text).ids == read.encode(text).tolist() == ids, text
        assert theirs.decode(ids) == text


def small() -> dict[str, Any]:
    """A tokenizer.json of 258 entries."""
    vocabulary = Vocabulary({token: number for number, token in enumerate([*CHARACTERS, "in", END_OF_TEXT])}, ["i n"])
    content: dict[str, Any] = json.loads(json.dumps(to_json(vocabulary)))
    return content


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda raw: raw["model"].update(type="Unigram"), "Unigram"),
        (lambda raw: raw["model"].update(dropout=0.1), "dropout"),
        (lambda raw: raw.update(normalizer={"type": "NFC"}), "NFC"),
        (lambda raw: raw["pre_tokenizer"].update(add_prefix_space=True), "add_prefix_space"),
        (lambda raw: raw["added_tokens"].append({"id": 7, "content": "[PAD]"}), r"\[PAD\]"),
    ],
)
def test_a_tokenizer_that_would_give_other_ids_is_refused_by_what_differs(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], object], says: str
) -> None:
    raw, path = small(), tmp_path / "tokenizer.json"
    spoil(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError, match=rf"tokenizer\.json: .*{says}"):
        Tokenizer(path).encode("text")
