from pathlib import Path

import orjson
import pytest

from common.errors import EmptyResultError
from common.files import read_lines
from common.settings import TokenizeSettings
from common.tokenizer import Tokenizer
from corpus.index import IndexedDataset, read_meta
from corpus.tokenize import tokenize
from tests.conftest import Command
from tests.helpers import assert_one_line_error, document, prose, read_shard, write_shard

TOKENIZER = Tokenizer()


def test_documents_are_encoded_in_order_and_closed_with_end_of_text(tmp_path: Path) -> None:
    texts = [prose(number) for number in range(5)]
    source = write_shard(tmp_path / "in.jsonl.zst", [document(n, text) for n, text in enumerate(texts)])
    stats = tokenize([source], tmp_path / "out", TokenizeSettings())
    dataset = IndexedDataset(tmp_path / "out_text_document")
    dataset.verify()
    for number, text in enumerate(texts):
        assert dataset[number].tolist() == [*TOKENIZER.encode(text).tolist(), 50256]
    assert stats.extra["tokens"] == len(dataset.tokens)
    meta = read_meta(tmp_path / "out_text_document")
    assert meta is not None and (meta.vocab_size, meta.end_of_text) == (50257, 50256)


def test_the_limit_counts_tokens_exactly_and_without_end_of_text(tmp_path: Path) -> None:
    texts = [" word" * 127, " word" * 128, " word" * 129]
    assert [len(TOKENIZER.encode(text)) for text in texts] == [127, 128, 129]
    source = write_shard(tmp_path / "in.jsonl.zst", [document(n, text) for n, text in enumerate(texts)])
    stats = tokenize([source], tmp_path / "out", TokenizeSettings(), tmp_path / "rejects.jsonl.zst")
    assert IndexedDataset(tmp_path / "out_text_document").lengths.tolist() == [129, 130]
    assert dict(stats.reasons) == {"short": 1}
    (reject,) = [orjson.loads(line) for line in read_lines(tmp_path / "rejects.jsonl.zst")]
    assert (reject["id"], reject["tokens"], reject["reason"]) == (f"{0:016x}", 127, "short")


def test_end_of_text_can_be_left_out(tmp_path: Path) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(1, " word" * 130)])
    tokenize([source], tmp_path / "out", TokenizeSettings(append_eod=False))
    assert 50256 not in IndexedDataset(tmp_path / "out_text_document").tokens


def test_the_worker_count_changes_no_byte(tmp_path: Path) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(n, prose(n, 100 + n)) for n in range(150)])
    for workers in (1, 2):
        tokenize([source], tmp_path / str(workers), TokenizeSettings(), workers=workers)
    for suffix in ("bin", "idx"):
        one, two = (tmp_path / f"{workers}_text_document.{suffix}" for workers in (1, 2))
        assert one.read_bytes() == two.read_bytes()


def test_end_of_text_written_in_a_page_stays_text(tmp_path: Path) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(1, "<|endoftext|>" * 100)])
    tokenize([source], tmp_path / "out", TokenizeSettings())
    tokens = IndexedDataset(tmp_path / "out_text_document").tokens.tolist()
    assert tokens.count(50256) == 1 and tokens[-1] == 50256


def test_nothing_long_enough_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(1, "short")])
    with pytest.raises(EmptyResultError, match=r"lower tokenize\.min_tokens"):
        tokenize([source], tmp_path / "out", TokenizeSettings(), tmp_path / "rejects.jsonl.zst")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl.zst"]


def test_the_command_writes_what_the_function_writes(tmp_path: Path, command: Command) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(1, prose(1)), document(2, " word" * 50)])
    result = command("corpus.tokenize", "--input", source, "--output-prefix", tmp_path / "out", "--min-tokens", 50)
    assert result.returncode == 0 and "2 of 2 documents kept" in result.stdout
    assert IndexedDataset(tmp_path / "out_text_document").n_documents == 2
    assert len(read_shard(source)) == 2
    wrong = command("corpus.tokenize", "--input", source, "--output-prefix", tmp_path / "out", "--min-tokens", -1)
    assert_one_line_error(wrong, "--min-tokens")
