import re
import subprocess
import sys
from itertools import count
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import EmptyResultError
from common.files import read_lines
from common.settings import TokenizeSettings
from common.tokenizer import Tokenizer
from corpus.index import IndexedDataset, read_meta
from corpus.tokenize import batches, encode_documents, tokenize
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


def test_the_worker_count_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus.tokenize._BATCH", 5000)  # many batches of a small shard
    source = write_shard(tmp_path / "in.jsonl.zst", [document(n, prose(n, 50 + n)) for n in range(150)])
    for workers in (1, 2, 4):
        rejects = tmp_path / f"{workers}_text_document.rejects"
        tokenize([source], tmp_path / str(workers), TokenizeSettings(), rejects, workers)
    for suffix in ("bin", "idx", "json", "rejects"):
        contents = {(tmp_path / f"{workers}_text_document.{suffix}").read_bytes() for workers in (1, 2, 4)}
        assert len(contents) == 1 and contents != {b""}


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=40), st.integers(0, 8), st.booleans())
def test_a_batch_is_each_long_enough_document_with_its_end(
    sizes: list[tuple[int, bool]], min_tokens: int, append_eod: bool
) -> None:
    documents = [document(number, " word" * words + "é" * accent) for number, (words, accent) in enumerate(sizes)]
    settings = TokenizeSettings(min_tokens=min_tokens, append_eod=append_eod)
    encoded = encode_documents(TOKENIZER, settings, documents)
    end = [50256] * append_eod
    ids = [TOKENIZER.encode(document["text"]).tolist() for document in documents]
    kept = [[*tokens, *end] for tokens in ids if len(tokens) >= min_tokens]
    assert encoded.tokens.tolist() == [token for tokens in kept for token in tokens]
    assert encoded.lengths.tolist() == [len(tokens) for tokens in kept]
    assert encoded.tokens.dtype == np.uint16
    short = [(document["id"], len(tokens)) for document, tokens in zip(documents, ids, strict=True)]
    assert [(one["id"], one["tokens"]) for one in encoded.short] == [one for one in short if one[1] < min_tokens]
    assert not any("text" in one for one in encoded.short)


def test_batches_are_of_text_and_not_of_documents() -> None:
    sizes = [300_000] * 5 + [3_000_000, 10, 10]
    documents = [document(number, "a" * size) for number, size in enumerate(sizes)]
    found = list(batches(iter(documents)))
    assert [len(batch) for batch in found] == [4, 2, 2]
    assert [one for batch in found for one in batch] == documents


def test_half_a_surrogate_pair_in_a_shard_is_a_bad_line(tmp_path: Path) -> None:
    lines = [f'{{"id": "{number}", "text": "{" word" * 200}"}}' for number in range(3)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, '{"id": "4", "text": "a \\ud83d b"}']))
    stats = tokenize([tmp_path / "in.jsonl"], tmp_path / "out", TokenizeSettings(), max_bad_share=0.5)
    assert (stats.documents_out, stats.extra["bad_lines"]) == (3, 1)


def test_progress_is_in_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("common.progress.LOG_INTERVAL", 1e-9)
    source = write_shard(tmp_path / "in.jsonl.zst", [document(1, " word" * 200)])
    tokenize([source], tmp_path / "out", TokenizeSettings())
    assert re.search(r"^tokenize: 201 tokens, [0-9.]+/s; 1 documents$", capsys.readouterr().err, re.MULTILINE)


def a_long_document(path: Path, megabytes: int) -> Path:
    """A shard of one document: distinct lines of words, and long runs of one character."""
    lines = (f"{prose(number, 300)} {number * 7919} {'=' * (number % 200)}\n" for number in count())
    text, size = [], 0
    while size < megabytes * 1_000_000:
        text.append(next(lines))
        size += len(text[-1])
    return write_shard(path, [document(1, "".join(text))])


def assert_encoded_line_by_line(source: Path, prefix: Path) -> None:
    (whole,) = read_shard(source)
    tokens = IndexedDataset(prefix)[0]
    # a line ends in `\n` and the next begins with a letter: pieces end where lines do
    lines = np.concatenate([TOKENIZER.encode(line) for line in whole["text"].splitlines(keepends=True)])
    assert np.array_equal(tokens[:-1], lines) and tokens[-1] == 50256


def test_a_document_of_five_megabytes_has_the_ids_of_its_lines(tmp_path: Path) -> None:
    source = a_long_document(tmp_path / "in.jsonl.zst", 5)
    tokenize([source], tmp_path / "out", TokenizeSettings(), workers=2)
    assert_encoded_line_by_line(source, tmp_path / "out_text_document")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["words", "one word"])
def test_a_document_of_fifty_megabytes_takes_a_bounded_amount_of_memory(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "in.jsonl.zst"
    if kind == "words":
        a_long_document(source, 50)
    else:
        write_shard(source, [document(1, "a" * 50_000_000)])
    code = (
        "from pathlib import Path; from corpus.tokenize import main; main(); "
        "print(int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) // 1024)"  # not the parent's
    )
    arguments = ["--input", source, "--output-prefix", tmp_path / "out"]
    result = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    # one piece of 50 MB is 50 million symbols for the encoder; of words it holds one at a time
    assert int(result.stdout.split()[-1]) < {"words": 800, "one word": 1900}[kind]
    if kind == "words":
        assert_encoded_line_by_line(source, tmp_path / "out_text_document")


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
    assert_one_line_error(wrong, "tokenize.min_tokens")
