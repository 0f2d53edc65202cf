import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer

from common.errors import InputError
from common.tokenizer import Tokenizer, vocabulary_files

FILES = vocabulary_files()
OURS = Tokenizer(FILES)
THEIRS = ByteLevelBPETokenizer(str(FILES.encoder_json), str(FILES.vocab_bpe))


def test_the_vocabulary_is_gpt2s() -> None:
    assert (OURS.vocab_size, OURS.end_of_text) == (50257, 50256)
    assert OURS.encode("Hello world").tolist() == [15496, 995]


def test_the_packaged_files_are_the_published_ones(shared_data: Path) -> None:
    assert FILES.encoder_json.read_bytes() == (shared_data / "gpt2" / "vocab.json").read_bytes()
    assert FILES.vocab_bpe.read_bytes() == (shared_data / "gpt2" / "merges.txt").read_bytes()


@given(st.text())
def test_ids_equal_those_of_the_tokenizers_library(text: str) -> None:
    assert OURS.encode(text).tolist() == THEIRS.encode(text).ids


@given(st.text())
def test_decoding_gives_the_text_back(text: str) -> None:
    assert OURS.decode(OURS.encode(text).tolist()) == text


def test_end_of_text_inside_a_page_is_ordinary_text() -> None:
    ids = OURS.encode("before <|endoftext|> after")
    assert OURS.end_of_text not in ids
    assert ids.dtype == np.uint32


def test_a_vocabulary_with_one_file_or_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs both files"):
        vocabulary_files(encoder_json=FILES.encoder_json)
    with pytest.raises(InputError, match=r"none\.bpe: no such vocabulary file"):
        vocabulary_files(FILES.encoder_json, tmp_path / "none.bpe")


def test_files_that_do_not_belong_together_are_an_error(tmp_path: Path) -> None:
    merges = FILES.vocab_bpe.read_text(encoding="utf-8").splitlines()
    (tmp_path / "vocab.bpe").write_text("\n".join(merges[:1000]) + "\n", encoding="utf-8")
    shutil.copy(FILES.encoder_json, tmp_path / "encoder.json")
    tokenizer = Tokenizer(vocabulary_files(tmp_path / "encoder.json", tmp_path / "vocab.bpe"))
    with pytest.raises(InputError, match="does not match"):
        tokenizer.encode("a")
