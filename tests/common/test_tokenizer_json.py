"""tokenizer.json: written as by `transformers`, read if it is GPT-2's byte-level BPE, refused otherwise."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Peer
from transformers import AutoTokenizer, GPT2Tokenizer

from common.errors import InputError
from common.files import write_json
from common.tokenizer import Tokenizer, TokenizerJson
from common.tokenizer_json import to_json

ODD = [
    "Naïve café — 3.14",
    " leading and trailing ",
    "\n\n\ttabs  and   runs\r\n",
    "I'll we've they'RE 'quoted'",
    "日本語 العربية עברית 👩‍👩‍👧‍👦 \u200b\ufeff\x00\x7f",
    "x" * 300,
    "",
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_json(path, to_json(Tokenizer().vocabulary), indent=False)
    return path


def test_the_file_we_write_encodes_and_decodes_as_we_do_in_hugging_faces_library(file: Path) -> None:
    ours, theirs = Tokenizer(), Peer.from_file(str(file))
    for text in ODD:
        ids = ours.encode(text).tolist()
        assert theirs.encode(text).ids == ids, text
        assert theirs.decode(ids) == text
    assert theirs.token_to_id("<|endoftext|>") == 50256 and theirs.get_vocab_size() == 50257
    assert theirs.encode("<|endoftext|>").ids == [50256]  # as in the file that transformers writes


def test_the_file_that_transformers_writes_alone_is_read_as_ours_and_means_the_same(tmp_path: Path, file: Path) -> None:
    files = Tokenizer().files
    assert not isinstance(files, TokenizerJson)
    GPT2Tokenizer(str(files.encoder_json), str(files.vocab_bpe)).save_pretrained(tmp_path)
    assert not (tmp_path / "merges.txt").exists()
    read = Tokenizer(TokenizerJson(tmp_path / "tokenizer.json"))
    assert read.vocabulary == Tokenizer().vocabulary
    assert [read.encode(text).tolist() for text in ODD] == [Tokenizer().encode(text).tolist() for text in ODD]
    theirs, ours = json.loads((tmp_path / "tokenizer.json").read_text()), json.loads(file.read_text())
    assert theirs["model"]["vocab"] == ours["model"]["vocab"] and theirs["model"]["merges"] == ours["model"]["merges"]
    assert theirs["pre_tokenizer"]["type"] == ours["pre_tokenizer"]["type"]
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    write_json(tmp_path / "tokenizer.json", ours)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*ODD, "a<|endoftext|>b"]:
        assert again(text)["input_ids"] == loaded(text)["input_ids"]


def set_model(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda raw: raw["model"].__setitem__(key, value)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (set_model("type", "Unigram"), "its model is Unigram"),
        (set_model("dropout", 0.1), "its model has dropout 0.1"),
        (set_model("byte_fallback", True), "byte_fallback"),
        (set_model("merges", []), "token 'in' has id|has id|no token"),
        (set_model("vocab", {"a": 0}), "has id 0"),
        (set_model("vocab", []), "not the structure of a tokenizer"),
        (lambda raw: raw.update(normalizer={"type": "NFC"}), "it has a normalizer, NFC"),
        (lambda raw: raw["pre_tokenizer"].update(add_prefix_space=True), "add_prefix_space"),
        (lambda raw: raw.update(pre_tokenizer={"type": "Whitespace"}), "its pre_tokenizer is not ByteLevel"),
        (lambda raw: raw.update(pre_tokenizer=None), "its pre_tokenizer is not ByteLevel"),
        (lambda raw: raw.pop("model"), "not the structure of a tokenizer"),
        (lambda raw: raw["added_tokens"].append({"id": 7, "content": "[PAD]"}), r"token '\[PAD\]' has id 7"),
    ],
)
def test_a_tokenizer_that_would_give_other_ids_is_refused_by_what_differs(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], object], says: str
) -> None:
    raw = copy.deepcopy(to_json(Tokenizer().vocabulary))
    spoil(raw)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError, match=says) as error:
        Tokenizer(TokenizerJson(path)).encode("text")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["[]", "{}", '"x"', "{", "null"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"tokenizer\.json: "):
        Tokenizer(TokenizerJson(tmp_path / "tokenizer.json")).encode("text")


def test_tokens_added_behind_end_of_text_change_nothing(tmp_path: Path) -> None:
    raw = to_json(Tokenizer().vocabulary)
    raw["added_tokens"].append({"id": 50257, "content": "[PAD]", "special": True})
    write_json(tmp_path / "tokenizer.json", raw)
    read = Tokenizer(TokenizerJson(tmp_path / "tokenizer.json"))
    assert (read.vocab_size, read.end_of_text) == (50257, 50256)
    assert read.encode("[PAD]").tolist() == Tokenizer().encode("[PAD]").tolist()
