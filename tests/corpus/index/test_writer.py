import tracemalloc
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InputError
from common.files import read_json
from corpus.index import IndexedDataset, IndexWriter, token_dtype
from tests.corpus.index.helpers import META, by_hand, files, written

DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 50256), max_size=5), max_size=3), max_size=6)


def test_the_bytes_are_those_of_the_format_table_and_the_json_has_their_checksums(tmp_path: Path) -> None:
    written(tmp_path / "a", [[1, 2, 3], [], [50256]])
    by_hand(tmp_path / "b", [[[1, 2, 3]], [[]], [[50256]]])
    ours, byte_by_byte = files(tmp_path / "a"), files(tmp_path / "b")
    assert (ours[".bin"], ours[".idx"]) == (byte_by_byte[".bin"], byte_by_byte[".idx"])
    data = xxhash.xxh3_64_hexdigest(ours[".bin"])  # by any program
    checksum = xxhash.xxh3_64_hexdigest(ours[".idx"] + f"50257 50256 {data}".encode())
    told = {"vocab_size": 50257, "end_of_text": 50256, "vocabulary": "", "bin": data, "checksum": checksum}
    assert read_json(tmp_path / "a.json") == told
    assert token_dtype(65499) == np.uint16 and token_dtype(65500) == np.int32


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from(["one by one", "at once", "index"]), DOCUMENTS), max_size=5))
def test_whatever_way_documents_are_added_the_bytes_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, list[list[list[int]]]]]
) -> None:
    folder, whole = tmp_path_factory.mktemp("index"), []
    with (
        patch("corpus.index.writer.ENTRIES", 3),  # pieces so small that the few documents are several of them
        patch("corpus.index.dataset.ENTRIES", 3),
        IndexWriter(folder / "pieces", "<u2") as index,
    ):
        for number, (how, documents) in enumerate(parts):
            if how == "index":
                index.add_index(IndexedDataset(by_hand(folder / f"part{number}", documents)))
                whole += documents
                continue
            flat = [[token for sequence in document for token in sequence] for document in documents]
            whole += [[tokens] for tokens in flat]
            if how == "at once":
                ids = [token for tokens in flat for token in tokens]
                index.add_documents(np.array(ids, np.uint32), [len(tokens) for tokens in flat])
            else:
                for tokens in flat:
                    index.add_document(tokens)
    assert files(folder / "pieces") == files(by_hand(folder / "whole", whole))


def test_an_error_leaves_what_was_there_before_and_names_what_does_not_fit(tmp_path: Path) -> None:
    written(tmp_path / "a", [[1, 2]])
    before = files(tmp_path / "a")
    for token in (65536, -1):
        with pytest.raises(InputError, match="uint16"):
            written(tmp_path / "a", [[1], [token]])
    with pytest.raises(InputError, match="2,147,483,648"), IndexWriter(tmp_path / "a", np.uint16) as index:
        index.add_document(np.broadcast_to(np.uint16(1), 2**31))
    with patch("corpus.index.writer.with_checksums", side_effect=OSError("disk full")), pytest.raises(OSError):
        written(tmp_path / "a", [[3]])
    assert files(tmp_path / "a") == before and len(list(tmp_path.iterdir())) == 3
    assert written(tmp_path / "a", [[3]], meta=None).meta is None, "the older vocabulary does not stay"


def test_memory_does_not_grow_with_documents(tmp_path: Path) -> None:
    """200,000 documents: 12 bytes each would be 2.4 MB."""
    tokens, lengths = np.ones(1000, np.uint16), np.ones(1000, np.int64)
    with patch("corpus.index.writer.ENTRIES", 1024), patch("corpus.index.layout.ENTRIES", 1024):
        tracemalloc.start()
        try:
            with IndexWriter(tmp_path / "a", np.uint16, META) as index:
                for _ in range(200):
                    index.add_documents(tokens, lengths)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert IndexedDataset(tmp_path / "a").n_documents == 200_000
    assert peak < 600_000
