import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from tokenizers import ByteLevelBPETokenizer

from common.errors import InputError
from common.files import read_json, short_hash
from common.settings import TokenizeSettings, TrainTokenizerSettings
from common.tokenizer import END_OF_TEXT, Tokenizer, VocabularyFiles, vocabulary_files
from corpus.index import IndexedDataset, read_meta
from corpus.tokenize import tokenize
from corpus.train_tokenizer import train_tokenizer
from tests.common.test_tokenizer import TEXTS
from tests.conftest import Command
from tests.helpers import assert_one_line_error, document, prose, read_shard, write_shard

SIZE = 600


def files_in(folder: Path) -> VocabularyFiles:
    return VocabularyFiles(folder / "encoder.json", folder / "vocab.bpe")


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of nine thousand words in several scripts."""
    texts = [prose(number, 300) + " Ünïcödé ‘quotes’, 中文字 中文, it's 12345.\n\n" for number in range(30)]
    return write_shard(
        tmp_path_factory.mktemp("texts") / "in.jsonl.zst",
        [{**document(number, text), "id": short_hash(text)} for number, text in enumerate(texts)],
    )


@pytest.fixture(scope="module")
def trained(shard: Path, tmp_path_factory: pytest.TempPathFactory) -> VocabularyFiles:
    """A vocabulary trained on the shard."""
    files = files_in(tmp_path_factory.mktemp("tokenizer"))
    train_tokenizer([shard], files, TrainTokenizerSettings(vocab_size=SIZE))
    return files


def test_a_signal_ends_the_training_at_once(shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, before = [], signal.getsignal(signal.SIGINT)

    def texts(*_: object) -> Iterator[str]:
        handlers.append(signal.getsignal(signal.SIGINT))
        yield "few words"

    monkeypatch.setattr("corpus.train_tokenizer._texts", texts)
    with pytest.raises(InputError, match="lower train_tokenizer"):
        train_tokenizer([shard], files_in(tmp_path), TrainTokenizerSettings(vocab_size=SIZE))
    assert handlers == [signal.SIG_DFL] and signal.getsignal(signal.SIGINT) is before


def test_the_vocabulary_has_the_size_and_ends_in_end_of_text(trained: VocabularyFiles) -> None:
    ids = read_json(trained.encoder_json)
    assert list(ids.values()) == list(range(SIZE)) and ids[END_OF_TEXT] == SIZE - 1
    assert trained.vocab_bpe.read_text().startswith("#version: 0.2\n")
    ours = Tokenizer(vocabulary_files(trained.encoder_json, trained.vocab_bpe))
    assert (ours.vocab_size, ours.end_of_text) == (SIZE, SIZE - 1)
    assert len(ours.encode(" sentence")) == 1, "a word of the texts has become a token"
    assert len(ours.encode(" zyzzyva")) > 3


def test_both_encoders_give_the_ids_of_the_tokenizers_library(trained: VocabularyFiles) -> None:
    theirs = ByteLevelBPETokenizer(str(trained.encoder_json), str(trained.vocab_bpe))
    ours = [Tokenizer(trained), Tokenizer(trained)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gigatoken", None)
        ours[1].encode("")

    @given(TEXTS)
    def check(text: str) -> None:
        for one in ours:
            ids = one.encode(text).tolist()
            assert ids == theirs.encode(text).ids
            assert one.decode(ids) == text

    check()
    for number in range(20):
        text = prose(number + 1000) + "<|endoftext|>"
        assert ours[0].encode(text).tolist() == ours[1].encode(text).tolist() == theirs.encode(text).ids
        assert SIZE - 1 not in ours[0].encode(text)


def test_the_tokenize_step_uses_it(trained: VocabularyFiles, shard: Path, tmp_path: Path) -> None:
    settings = TokenizeSettings(encoder_json=trained.encoder_json, vocab_bpe=trained.vocab_bpe)
    tokenize([shard], tmp_path / "out", settings)
    dataset, meta = IndexedDataset(tmp_path / "out_text_document"), read_meta(tmp_path / "out_text_document")
    dataset.verify()
    assert meta is not None and (meta.vocab_size, meta.end_of_text) == (SIZE, SIZE - 1)
    assert dataset[0][-1] == SIZE - 1
    assert Tokenizer(trained).decode(dataset[0][:-1].tolist()).endswith("12345.\n\n")


def test_workers_hash_seed_and_the_order_of_documents_change_no_byte(
    trained: VocabularyFiles, shard: Path, tmp_path: Path
) -> None:
    documents = read_shard(shard)
    write_shard(tmp_path / "a.jsonl.zst", documents[::-2])
    write_shard(tmp_path / "b.jsonl.zst", documents[-2::-2])
    command = [sys.executable, "-m", "corpus.train_tokenizer", "--vocab-size", str(SIZE), "--workers", "3", "--input"]
    for seed in ("1", "2"):
        folder = tmp_path / seed
        arguments = [str(tmp_path / "a.jsonl.zst"), str(tmp_path / "b.jsonl.zst"), "--output-dir", str(folder)]
        subprocess.run([*command, *arguments], check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        for ours, theirs in zip(
            (trained.encoder_json, trained.vocab_bpe), (folder / "encoder.json", folder / "vocab.bpe"), strict=True
        ):
            assert ours.read_bytes() == theirs.read_bytes()


def test_a_share_takes_the_same_documents_whatever_the_shards(shard: Path, tmp_path: Path) -> None:
    rules = TrainTokenizerSettings(vocab_size=300, share=0.5)
    stats = train_tokenizer([shard], files_in(tmp_path / "whole"), rules)
    assert 5 < stats.documents_out < 25
    assert stats.reasons["share"] == 30 - stats.documents_out
    documents = read_shard(shard)
    parts = [write_shard(tmp_path / f"{part}.jsonl.zst", documents[part::3]) for part in range(3)]
    train_tokenizer(parts, files_in(tmp_path / "parts"), rules)
    assert files_in(tmp_path / "whole").vocab_bpe.read_bytes() == files_in(tmp_path / "parts").vocab_bpe.read_bytes()


def test_text_too_small_for_the_size_is_an_error_that_says_what_was_reached(shard: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"30 documents give \d+ vocabulary entries, not 32000; lower train_tokenizer\.vocab_size"
    ):
        train_tokenizer([shard], files_in(tmp_path), TrainTokenizerSettings(vocab_size=32000))
    assert not list(tmp_path.iterdir())


def test_a_bad_line_stops_it_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "1", "text": "a"}\n{"id": 2}\n')
    with pytest.raises(InputError, match=r"in\.jsonl:2: no string under 'text'"):
        train_tokenizer([tmp_path / "in.jsonl"], files_in(tmp_path / "out"), TrainTokenizerSettings(vocab_size=257))
    assert not (tmp_path / "out").exists()
    (tmp_path / "in.jsonl.zst").write_bytes(b"nothing")
    with pytest.raises(InputError, match="damaged zstd file"):
        train_tokenizer([tmp_path / "in.jsonl.zst"], files_in(tmp_path / "out"), TrainTokenizerSettings(vocab_size=257))


def test_the_command_needs_a_size_that_has_room_for_the_bytes(shard: Path, tmp_path: Path, command: Command) -> None:
    arguments = ("corpus.train_tokenizer", "--input", shard, "--output-dir", tmp_path)
    assert_one_line_error(command(*arguments), "--vocab-size", "train_tokenizer.vocab_size")
    assert_one_line_error(command(*arguments, "--vocab-size", 256), "257 entries at least")
    result = command(*arguments, "--vocab-size", 257, "--stats", tmp_path / "stats.json")
    assert result.returncode == 0, result.stderr
    assert read_json(tmp_path / "stats.json")["vocab_size"] == 257
    assert Tokenizer(files_in(tmp_path)).encode("é").tolist() == [127, 102]
