from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson

from common.files import read_lines
from common.settings import TokenizeSettings
from common.tokenizer import Tokenizer
from corpus.index import IndexedDataset, Meta, read_meta
from corpus.tokenize import tokenize
from tests.conftest import Command
from tests.helpers import document, prose, write_shard

TOKENIZER = Tokenizer()


def test_documents_are_encoded_in_order_and_closed_with_end_of_text(tmp_path: Path) -> None:
    texts = [*map(prose, range(5)), "<|endoftext|>" * 100]
    source = write_shard(tmp_path / "in.jsonl.zst", [document(n, text) for n, text in enumerate(texts)])
    stats = tokenize([source], tmp_path / "out", TokenizeSettings())
    dataset, meta = IndexedDataset(tmp_path / "out_text_document"), read_meta(tmp_path / "out_text_document")
    dataset.verify()
    for number, text in enumerate(texts):
        assert dataset[number].tolist() == [*TOKENIZER.encode(text).tolist(), 50256]
    assert dataset.tokens.tolist().count(50256) == len(texts), "written in a page it stays text"
    assert stats.extra["tokens"] == len(dataset.tokens)
    assert (
        meta == Meta(50257, 50256)
        and meta.vocabulary
        == TOKENIZER.vocabulary.hash
        != replace(TOKENIZER.vocabulary, merges=TOKENIZER.vocabulary.merges[::-1]).hash
    )
    tokenize([source], tmp_path / "out", TokenizeSettings(append_eod=False))
    assert 50256 not in IndexedDataset(tmp_path / "out_text_document").tokens


def test_the_limit_counts_tokens_exactly_and_without_end_of_text(tmp_path: Path, command: Command) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(n, " word" * n) for n in (127, 128, 129)])
    options = ("--output-prefix", tmp_path / "out", "--rejects", tmp_path / "rejects.jsonl.zst")
    done = command("corpus.tokenize", "--input", source, *options)
    assert done.returncode == 0, done.stderr
    assert IndexedDataset(tmp_path / "out_text_document").lengths.tolist() == [129, 130]
    (reject,) = [orjson.loads(line) for line in read_lines(tmp_path / "rejects.jsonl.zst")]
    assert (reject["id"], reject["tokens"], reject["reason"]) == (f"{127:016x}", 127, "short")


def test_a_long_document_among_others_has_the_ids_of_its_lines_whatever_the_workers(tmp_path: Path) -> None:
    """It is encoded in pieces, which end where lines do."""
    text = "".join(f"{prose(number, 300)} {number * 7919} {'=' * (number % 200)}\n" for number in range(1500))
    texts = [*(prose(n, 50 + n % 100) for n in range(150)), text, *(prose(n, 5000) for n in range(20))]
    source = write_shard(tmp_path / "in.jsonl.zst", [document(n, text) for n, text in enumerate(texts)])
    for workers in (1, 3):
        rejects = tmp_path / f"{workers}_text_document.rejects"
        tokenize([source], tmp_path / str(workers), TokenizeSettings(), rejects=rejects, workers=workers)
    for suffix in ("bin", "idx", "json", "rejects"):
        contents = {(tmp_path / f"{workers}_text_document.{suffix}").read_bytes() for workers in (1, 3)}
        assert len(contents) == 1 and contents != {b""}
    dataset = IndexedDataset(tmp_path / "1_text_document")
    lines = np.concatenate([TOKENIZER.encode(line) for line in text.splitlines(keepends=True)])
    assert np.array_equal(dataset[int(np.argmax(dataset.lengths))][:-1], lines)
