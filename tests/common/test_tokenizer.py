import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer
from tokenizers import Tokenizer as Peer
from transformers import GPT2Tokenizer

from common.errors import InputError
from common.tokenizer import Tokenizer
from common.vocabulary import Vocabulary, VocabularyFiles, to_json, vocabulary_files


def without_gigatoken() -> Tokenizer:
    """A tokenizer on a machine without gigatoken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gigatoken", None)
        ours = Tokenizer()
        ours.encode("")
    return ours


FILES = vocabulary_files()
OURS = [Tokenizer(), without_gigatoken()]
THEIRS = ByteLevelBPETokenizer(str(FILES.encoder_json), str(FILES.vocab_bpe))

# where GPT-2's pattern decides, and where implementations differ: contractions, kinds of white
# space, digits and letters of other scripts, marks, joined emoji, controls, the special token
_EDGES = st.sampled_from(
    "'s 'T 'll 'RE 've ' ’s a B é é ǅ ß 中 ا क ् ٣ ½ Ⅷ ² _ . ... -- # 👨 🏽 ️ 🇩 <|endoftext|> <| endoftext |>".split(" ")
) | st.sampled_from(
    " \n\r\t\x0b\x1c\x1f\x85\xa0\u1680\u180e\u2003\u2028\u202f\u3000"  # white space, or nearly
    "\u0301\u200b\u200d\ufe0f\ufeff\x00\x7f\ufffd\uffff\U000e0041"  # marks, joiners, controls, nothing
)
_RUNS = st.builds(str.__mul__, _EDGES | st.characters(codec="utf-8"), st.integers(1, 40))
TEXTS = st.text() | st.lists(_EDGES | _RUNS | st.text(max_size=5), max_size=30).map("".join)


def test_the_vocabulary_is_gpt2s() -> None:
    for ours in OURS:
        assert (ours.vocab_size, ours.end_of_text) == (50257, 50256)
        assert ours.encode("Hello world").tolist() == [15496, 995]
        assert ours.encode("Hello world").dtype == np.uint32
        ids = ours.encode("before <|endoftext|> after")
        assert 50256 not in ids and ours.decode(ids.tolist()) == "before <|endoftext|> after"
        with pytest.raises(InputError, match=r"D83D\) at character 2"):
            ours.encode("ab\ud83d")


@given(TEXTS)
def test_ids_equal_those_of_the_tokenizers_library_and_decode_to_the_text(text: str) -> None:
    expected = THEIRS.encode(text).ids
    for ours in OURS:
        assert ours.encode(text).tolist() == expected
        assert ours.decode(expected) == text


def test_files_that_are_missing_or_do_not_belong_together_are_an_error(tmp_path: Path) -> None:
    files = VocabularyFiles(tmp_path / "encoder.json", tmp_path / "vocab.bpe")
    shutil.copy(FILES.encoder_json, files.encoder_json)
    (tmp_path / "tokenizer.json").touch()  # what transformers 5 saves alone
    with pytest.raises(
        InputError, match=r"vocab_bpe: .*vocab\.bpe: no such file; set .*json to .*tokenizer\.json, and"
    ):
        vocabulary_files(files.encoder_json, files.vocab_bpe)
    with pytest.raises(InputError, match=r"encoder\.json: not a tokenizer\.json; .*set tokenize\.vocab_bpe"):
        Tokenizer(vocabulary_files(files.encoder_json)).encode("a")
    for merges in (b"#version: 0.2\n\xc4\xa0 t\n", b"\xff\xfe"):
        files.vocab_bpe.write_bytes(merges)
        with pytest.raises(InputError, match=r"vocab\.bpe: "):
            Tokenizer(files).encode("a")


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
    content: dict[str, Any] = json.loads(json.dumps(to_json(Vocabulary.of_merges(["i n"]))))
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
