import pickle
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer

from common import tokenizer
from common.errors import InputError
from common.tokenizer import Tokenizer, VocabularyFiles, vocabulary_files
from tests.helpers import prose


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

# where GPT-2's pattern decides, and where implementations differ: contractions, kinds of white space, digits and
# letters of other scripts, marks, joined emoji, controls, the special token
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


def test_the_packaged_files_are_the_published_ones(shared_data: Path) -> None:
    assert FILES.encoder_json.read_bytes() == (shared_data / "gpt2" / "vocab.json").read_bytes()
    assert FILES.vocab_bpe.read_bytes() == (shared_data / "gpt2" / "merges.txt").read_bytes()


@given(TEXTS)
def test_ids_equal_those_of_the_tokenizers_library(text: str) -> None:
    expected = THEIRS.encode(text).ids
    for ours in OURS:
        assert ours.encode(text).tolist() == expected


def assert_code_points_are_alike(code_points: range) -> None:
    for start in range(code_points.start, code_points.stop, 2048):
        characters = map(chr, [number for number in range(start, start + 2048) if not 0xD800 <= number < 0xE000])
        text = "".join(f"{character}a {character}" for character in characters)
        expected = THEIRS.encode(text).ids
        for ours in OURS:
            assert ours.encode(text).tolist() == expected, hex(start)


def test_every_assigned_code_point_has_the_ids_of_the_tokenizers_library() -> None:
    assert_code_points_are_alike(range(0x34000))
    assert_code_points_are_alike(range(0xE0000, 0xE1000))


@pytest.mark.slow
def test_every_code_point_has_the_ids_of_the_tokenizers_library() -> None:
    assert_code_points_are_alike(range(0x110000))


@given(TEXTS)
def test_decoding_gives_the_text_back(text: str) -> None:
    assert OURS[0].decode(OURS[0].encode(text).tolist()) == text


def test_decoding_names_the_special_token_and_replaces_what_is_no_character() -> None:
    assert OURS[0].decode([15496, 50256]) == "Hello<|endoftext|>"
    assert OURS[0].decode(OURS[0].encode("\u1680").tolist()[:1]) == "\ufffd"


def test_end_of_text_inside_a_page_is_ordinary_text() -> None:
    for ours in OURS:
        ids = ours.encode("before <|endoftext|> after<|endoftext|>")
        assert ours.end_of_text not in ids
        assert ours.decode(ids.tolist()) == "before <|endoftext|> after<|endoftext|>"


def test_half_a_surrogate_pair_is_an_error_that_says_where() -> None:
    for ours in OURS:
        with pytest.raises(InputError, match=r"U\+D83D\) at character 2"):
            ours.encode("ab\ud83d")


def test_without_gigatoken_the_other_encoder_is_used() -> None:
    assert [isinstance(ours._encode, tokenizer._Gigatoken) for ours in OURS] == [True, False]


def test_starting_afresh_changes_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [prose(number) for number in range(6)]
    expected = [OURS[0].encode(text).tolist() for text in texts]
    monkeypatch.setattr(tokenizer, "_CACHED_BYTES", 2000)
    ours = Tokenizer(FILES)
    encoders = set()
    for text, ids in zip(texts, expected, strict=True):
        assert ours.encode(text).tolist() == ids
        encoders.add(ours._encode._tokenizer)  # type: ignore[attr-defined]
    assert len(encoders) > 1


def test_a_copy_for_another_process_carries_the_files_alone() -> None:
    assert len(pickle.dumps(OURS[0])) < 1000
    assert pickle.loads(pickle.dumps(OURS[0])).encode("Hello world").tolist() == [15496, 995]


def test_a_batch_is_its_texts_laid_end_to_end() -> None:
    texts = ["", prose(1), "é", "", prose(2)]
    for ours in OURS:
        ids, lengths = ours.encode_batch(texts)
        assert ids.tolist() == [token for text in texts for token in ours.encode(text).tolist()]
        assert lengths.tolist() == [len(ours.encode(text)) for text in texts]
        assert [array.tolist() for array in ours.encode_batch([])] == [[], []]


def test_other_threads_run_while_a_text_is_encoded() -> None:
    for ours in OURS:
        started, done, moments = threading.Event(), threading.Event(), 0
        text = "7" * 300_000  # a single token of the pattern, with no cached word
        thread = threading.Thread(target=lambda: (started.set(), ours.encode(text), done.set()))  # noqa: B023
        thread.start()
        started.wait()
        while not done.wait(0.001):
            moments += 1
        thread.join()
        assert moments > 5


@pytest.mark.parametrize("unit", ["a", "中", " ", "\n", "xq", "7"])
def test_a_megabyte_without_a_break_is_encoded(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    ids = [ours.encode(text) for ours in OURS]
    assert np.array_equal(*ids)
    assert OURS[0].decode(ids[0].tolist()) == text


def test_a_vocabulary_with_one_file_or_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs both files"):
        vocabulary_files(encoder_json=FILES.encoder_json)
    with pytest.raises(InputError, match=r"none\.bpe: no such vocabulary file"):
        vocabulary_files(FILES.encoder_json, tmp_path / "none.bpe")


@pytest.mark.parametrize(
    ("encoder", "merges"),
    [(None, b"#version: 0.2\n\xc4\xa0 t\n"), (None, b"\xff\xfe"), (b'{"a": 0}', None), (b"[]", None)],
)
def test_files_that_do_not_belong_together_are_an_error(
    tmp_path: Path, encoder: bytes | None, merges: bytes | None
) -> None:
    files = VocabularyFiles(tmp_path / "encoder.json", tmp_path / "vocab.bpe")
    for path, original, content in (
        (files.encoder_json, FILES.encoder_json, encoder),
        (files.vocab_bpe, FILES.vocab_bpe, merges),
    ):
        shutil.copy(original, path)
        if content is not None:
            path.write_bytes(content)
    with pytest.raises(InputError, match=r"vocab\.bpe: (does not match|not UTF-8 text).*encoder\.json"):
        Tokenizer(files).encode("a")
