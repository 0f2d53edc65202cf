import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from common.errors import InputError
from common.files import read_json, short_hash
from common.settings import TokenizeSettings, TrainTokenizerSettings
from common.tokenizer import Tokenizer
from common.vocabulary import END_OF_TEXT, VocabularyFiles, vocabulary_files
from corpus.index import IndexedDataset, read_meta
from corpus.tokenize import tokenize
from corpus.train_tokenizer import train_tokenizer
from tests.helpers import assert_one_line_error, called, document, prose, read_shard, write_shard

SIZE = 600


def files_in(folder: Path) -> VocabularyFiles:
    return VocabularyFiles(folder / "encoder.json", folder / "vocab.bpe")


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A shard of nine thousand words in several scripts."""
    texts = [prose(number, 300) + " Ünïcödé ‘quotes’, 中文字 中文, it's 12345.\n\n" for number in range(30)]
    documents = [{**document(number, text), "id": short_hash(text)} for number, text in enumerate(texts)]
    return write_shard(tmp_path / "in.jsonl.zst", documents)


def test_the_vocabulary_is_the_same_whatever_the_workers_and_shards_and_the_tokenize_step_uses_it(
    shard: Path, tmp_path: Path
) -> None:
    trained, documents = files_in(tmp_path / "trained"), read_shard(shard)
    train_tokenizer([shard], trained, TrainTokenizerSettings(vocab_size=SIZE))
    ids = read_json(trained.encoder_json)
    assert list(ids.values()) == list(range(SIZE)) and ids[END_OF_TEXT] == SIZE - 1
    ours = Tokenizer(vocabulary_files(trained.encoder_json, trained.vocab_bpe))
    theirs = ByteLevelBPETokenizer(str(trained.encoder_json), str(trained.vocab_bpe))
    assert len(ours.encode(" sentence")) == 1 and len(ours.encode(" zyzzyva")) > 3
    rules = TokenizeSettings(encoder_json=trained.encoder_json, vocab_bpe=trained.vocab_bpe)
    tokenize([shard], tmp_path / "out", rules)
    dataset, meta = IndexedDataset(tmp_path / "out_text_document"), read_meta(tmp_path / "out_text_document")
    assert meta is not None and (meta.vocab_size, meta.end_of_text) == (SIZE, SIZE - 1)
    assert dataset[0].tolist() == [*theirs.encode(documents[0]["text"]).ids, SIZE - 1]
    assert ours.decode(dataset[0][:-1].tolist()) == documents[0]["text"]

    halves = [write_shard(tmp_path / f"{n}.zst", documents[start::-2]) for n, start in enumerate((-1, -2))]
    command = [sys.executable, "-m", "corpus.train_tokenizer", f"train_tokenizer.vocab_size={SIZE}", "--workers", "3"]
    again, environment = tmp_path / "again", {**os.environ, "PYTHONHASHSEED": "1"}
    subprocess.run([*command, "--output-dir", again, "--input", *halves], check=True, env=environment)
    for file in trained.encoder_json, trained.vocab_bpe:
        assert file.read_bytes() == (again / file.name).read_bytes()


def test_bad_input_leaves_nothing(shard: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "1", "text": "a"}\n{"id": 2}\n')
    output = tmp_path / "out"
    with pytest.raises(InputError, match=r"in\.jsonl:2"):
        train_tokenizer([tmp_path / "in.jsonl"], files_in(output), TrainTokenizerSettings(vocab_size=257))
    with pytest.raises(InputError, match=r"train_tokenizer\.vocab_size"):
        train_tokenizer([shard], files_in(output), TrainTokenizerSettings(vocab_size=32000))
    assert not list(output.glob("*"))
    arguments = ("corpus.train_tokenizer", "--input", shard, "--output-dir", output)
    assert_one_line_error(called(*arguments, "train_tokenizer.vocab_size=256"), "257")
    assert called(*arguments, "train_tokenizer.vocab_size=257").returncode == 0
    assert Tokenizer(files_in(output)).encode("é").tolist() == [127, 102]
