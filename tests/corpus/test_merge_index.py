from pathlib import Path

import numpy as np
import pytest

from common.errors import EmptyResultError, InputError
from corpus.index import IndexedDataset, IndexWriter, Meta
from corpus.merge_index import main, merge_index


def shard(prefix: Path, documents: list[list[int]], dtype: str = "u2", vocab_size: int = 50257) -> Path:
    with IndexWriter(prefix, np.dtype(dtype), Meta(vocab_size, vocab_size - 1)) as index:
        for tokens in documents:
            index.add_document(tokens)
    return prefix


def test_every_document_of_every_shard_comes_out_in_order(tmp_path: Path) -> None:
    shards = [[[1, 2], [3]], [], [[], [4, 5, 6]], [[7]]]
    prefixes = [shard(tmp_path / f"{n}", documents) for n, documents in enumerate(shards)]
    merge_index(prefixes, tmp_path / "all")
    merged = IndexedDataset(tmp_path / "all")
    merged.verify()
    assert [merged[n].tolist() for n in range(len(merged))] == [tokens for documents in shards for tokens in documents]
    assert merged.document_index.tolist() == [0, 1, 2, 3, 4, 5]


def test_documents_of_several_sequences_stay_together(tmp_path: Path) -> None:
    """Such files are made elsewhere (sentence splitting): 2 documents, of 2 and 1 sequences."""
    first = shard(tmp_path / "a", [[1, 2], [3], [4]])
    data = bytearray((tmp_path / "a.idx").read_bytes())
    del data[-8:]  # documents 0..3 -> 0, 2, 3
    data[26:34] = (3).to_bytes(8, "little")
    data[-24:] = b"".join(number.to_bytes(8, "little") for number in (0, 2, 3))
    (tmp_path / "a.idx").write_bytes(data)
    merge_index([first, first], tmp_path / "all")
    merged = IndexedDataset(tmp_path / "all")
    merged.verify()
    assert merged.document_index.tolist() == [0, 2, 3, 5, 6]


def test_shards_of_another_dtype_or_vocabulary_are_refused(tmp_path: Path) -> None:
    first = shard(tmp_path / "a", [[1]])
    for other in (shard(tmp_path / "b", [[1]], dtype="i4"), shard(tmp_path / "c", [[1]], vocab_size=500)):
        with pytest.raises(InputError, match="tokenize all shards with one vocabulary"):
            merge_index([first, other], tmp_path / "all")
    assert not list(tmp_path.glob("all*"))


def test_no_documents_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EmptyResultError, match="no documents in 2 shard"):
        merge_index([shard(tmp_path / "a", []), shard(tmp_path / "b", [])], tmp_path / "all")
    assert not list(tmp_path.glob("all*"))


def test_an_input_may_not_be_the_output(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is an input and the output"):
        merge_index([shard(tmp_path / "a", [[1]])], tmp_path / "a")


def test_the_command_takes_prefixes_and_index_files(tmp_path: Path) -> None:
    shard(tmp_path / "a", [[1]]), shard(tmp_path / "b", [[2]])
    assert main(["--inputs", f"{tmp_path}/a", f"{tmp_path}/b.idx", "--output-prefix", f"{tmp_path}/all"]) == 0
    assert IndexedDataset(tmp_path / "all").tokens.tolist() == [1, 2]
