import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from tokenizers import ByteLevelBPETokenizer

from common.errors import InputError
from common.files import read_json, short_hash
from common.settings import TokenizeSettings, TrainTokenizerSettings
from common.tokenizer import END_OF_TEXT, Tokenizer, VocabularyFiles, vocabulary_files
from corpus.index import IndexedDataset, read_meta
from corpus.tokenize import tokenize
from corpus.train_tokenizer import train_tokenizer
from tests.common.commands import here
from tests.common.test_tokenizer import TEXTS
from tests.helpers import assert_one_line_error, document, prose, read_shard, write_shard

SIZE = 600


def files_in(folder: Path) -> VocabularyFiles:
    return VocabularyFiles(folder / "encoder.json", folder / "vocab.bpe")


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of nine thousand words in several scripts."""
    texts = [prose(number, 300) + " Ünïcödé ‘quotes’, 中文字 中文, it's 12345.\n\n" for number in range(30)]
    documents = [{**document(number, text), "id": short_hash(text)} for number, text in enumerate(texts)]
    return write_shard(tmp_path_factory.mktemp("texts") / "in.jsonl.zst", documents)


@pytest.fixture(scope="module")
def trained(shard: Path, tmp_path_factory: pytest.TempPathFactory) -> VocabularyFiles:
    """A vocabulary trained on the shard."""
    files = files_in(tmp_path_factory.mktemp("tokenizer"))
    train_tokenizer([shard], files, TrainTokenizerSettings(vocab_size=SIZE))
    return files


def test_the_vocabulary_has_the_size_ends_in_end_of_text_and_the_tokenize_step_uses_it(
    trained: VocabularyFiles, shard: Path, tmp_path: Path
) -> None:
    ids = read_json(trained.encoder_json)
    assert list(ids.values()) == list(range(SIZE)) and ids[END_OF_TEXT] == SIZE - 1
    ours = Tokenizer(vocabulary_files(trained.encoder_json, trained.vocab_bpe))
    assert (ours.vocab_size, ours.end_of_text) == (SIZE, SIZE - 1)
    assert len(ours.encode(" sentence")) == 1 and len(ours.encode(" zyzzyva")) > 3
    tokenize(
        [shard],
        tmp_path / "out",
        TokenizeSettings(encoder_json=trained.encoder_json, vocab_bpe=trained.vocab_bpe),
    )
    dataset, meta = IndexedDataset(tmp_path / "out_text_document"), read_meta(tmp_path / "out_text_document")
    assert meta is not None and (meta.vocab_size, meta.end_of_text) == (SIZE, SIZE - 1)
    assert dataset[0][-1] == SIZE - 1
    assert ours.decode(dataset[0][:-1].tolist()) == read_shard(shard)[0]["text"]


def test_both_encoders_give_the_ids_of_the_tokenizers_library(trained: VocabularyFiles) -> None:
    theirs = ByteLevelBPETokenizer(str(trained.encoder_json), str(trained.vocab_bpe))
    ours = [Tokenizer(trained), Tokenizer(trained)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gigatoken", None)
        ours[1].encode("")

    @settings(max_examples=50)
    @given(TEXTS)
    def check(text: str) -> None:
        for one in ours:
            ids = one.encode(text).tolist()
            assert ids == theirs.encode(text).ids and SIZE - 1 not in ids
            assert one.decode(ids) == text

    check()


def test_workers_hash_seed_and_the_order_of_documents_change_no_byte(
    trained: VocabularyFiles, shard: Path, tmp_path: Path
) -> None:
    documents = read_shard(shard)
    halves = [write_shard(tmp_path / f"{n}.zst", documents[start::-2]) for n, start in enumerate((-1, -2))]
    command = [sys.executable, "-m", "corpus.train_tokenizer", "--vocab-size", str(SIZE), "--workers", "3"]
    subprocess.run(
        [*command, "--output-dir", tmp_path, "--input", *halves], check=True, env={**os.environ, "PYTHONHASHSEED": "1"}
    )
    for ours, name in ((trained.encoder_json, "encoder.json"), (trained.vocab_bpe, "vocab.bpe")):
        assert ours.read_bytes() == (tmp_path / name).read_bytes()


def test_a_share_takes_the_same_documents_whatever_the_shards(shard: Path, tmp_path: Path) -> None:
    rules = TrainTokenizerSettings(vocab_size=300, share=0.5)
    stats = train_tokenizer([shard], files_in(tmp_path / "whole"), rules)
    assert 5 < stats.documents_out < 25 and stats.reasons["share"] == 30 - stats.documents_out
    documents = read_shard(shard)
    parts = [write_shard(tmp_path / f"{part}.jsonl.zst", documents[part::3]) for part in range(3)]
    train_tokenizer(parts, files_in(tmp_path / "parts"), rules)
    assert files_in(tmp_path / "whole").vocab_bpe.read_bytes() == files_in(tmp_path / "parts").vocab_bpe.read_bytes()


def test_bad_input_leaves_nothing(shard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "1", "text": "a"}\n{"id": 2}\n')
    output = tmp_path / "out"
    with pytest.raises(InputError, match=r"in\.jsonl:2"):
        train_tokenizer([tmp_path / "in.jsonl"], files_in(output), TrainTokenizerSettings(vocab_size=257))
    with pytest.raises(InputError, match=r"train_tokenizer\.vocab_size"):
        train_tokenizer([shard], files_in(output), TrainTokenizerSettings(vocab_size=32000))
    assert not list(output.glob("*"))
    arguments = ("corpus.train_tokenizer", "--input", shard, "--output-dir", output)
    assert_one_line_error(here(capsys, *arguments), "--vocab-size")
    assert_one_line_error(here(capsys, *arguments, "--vocab-size", 256), "257")
    assert here(capsys, *arguments, "--vocab-size", 257).returncode == 0
    assert Tokenizer(files_in(output)).encode("é").tolist() == [127, 102]
