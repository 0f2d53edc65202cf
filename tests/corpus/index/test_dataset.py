import os
import struct
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InputError
from corpus.index import IndexedDataset, Meta, read_meta
from corpus.index.layout import pointers
from tests.corpus.index.helpers import META, by_hand, contents, written

SEVERAL = [[[1, 2], [3]], [], [[]], [[4, 5, 6], [], [7]]]  # documents of 2, 0, 1 and 3 sequences


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 50256))))
def test_documents_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    prefix = tmp_path_factory.mktemp("index") / "name.with.dots_text_document"
    dataset = written(prefix, documents)
    dataset.verify()
    assert dataset.n_documents == len(dataset) == len(documents)
    assert [dataset[number].tolist() for number in range(len(dataset))] == documents
    assert [dataset.document(number).tolist() for number in range(len(dataset))] == documents
    assert dataset.tokens.tolist() == [token for tokens in documents for token in tokens]
    assert dataset.document_index.tolist() == list(range(len(documents) + 1))


@pytest.mark.parametrize("kind", ["B", "b", "h", "i", "q", "H"])
def test_the_files_of_others_are_read(tmp_path: Path, kind: str) -> None:
    dataset = IndexedDataset(by_hand(tmp_path / "a", SEVERAL, kind))
    dataset.verify()
    assert contents(dataset) == SEVERAL and dataset.modes is None
    assert [dataset.document(n).tolist() for n in range(4)] == [[1, 2, 3], [], [], [4, 5, 6, 7]]


def test_modes_are_read_where_there_are_some(tmp_path: Path) -> None:
    dataset = IndexedDataset(by_hand(tmp_path / "a", SEVERAL, modes=[0, 1, 0, 1, 1, 0]))
    assert dataset.modes is not None and dataset.modes.tolist() == [0, 1, 0, 1, 1, 0]
    assert contents(dataset) == SEVERAL


def test_a_sequence_is_a_view_into_the_file(tmp_path: Path) -> None:
    dataset = written(tmp_path / "a", [[1, 2, 3], [4, 5]])
    assert np.shares_memory(dataset[1], dataset.tokens) and not dataset[1].flags.writeable


def test_the_vocabulary_travels_with_the_dataset(tmp_path: Path) -> None:
    written(tmp_path / "a", [[1]])
    assert read_meta(tmp_path / "a") == META
    written(tmp_path / "b", [[1]], meta=None)
    assert read_meta(tmp_path / "b") is None
    for text in ('{"size": 3}', '{"vocab_size": "3", "end_of_text": 2}', "[3, 2]"):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(InputError, match=r"b\.json: not a description of a dataset"):
            read_meta(tmp_path / "b")


def test_a_vocabulary_written_by_hand_needs_no_checksum(tmp_path: Path) -> None:
    by_hand(tmp_path / "a", SEVERAL)
    (tmp_path / "a.json").write_text('{"vocab_size": 8, "end_of_text": 7}')
    IndexedDataset(tmp_path / "a").verify()
    assert read_meta(tmp_path / "a") == Meta(8, 7)
    (tmp_path / "a.json").write_text('{"vocab_size": 7, "end_of_text": 6}')
    with pytest.raises(InputError, match="token 6 is 7, outside the vocabulary of 7"):
        IndexedDataset(tmp_path / "a").verify()


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (34, "<i", -3, "sequence 0 has a negative length"),
        (34 + 8, "<q", 2, "pointer of sequence 0 is 2, but it begins at 0"),
        (34 + 8 + 8, "<q", 2, "pointer of sequence 1 is 2, but it begins at 6"),
        (34 + 8 + 16, "<q", 1, "document index"),
        (34 + 8 + 16 + 8, "<q", 5, "document index"),
        (34 + 8 + 16 + 16, "<q", 1, "document index"),
    ],
)
def test_opening_names_what_contradicts_itself(
    tmp_path: Path, offset: int, layout: str, value: int, message: str
) -> None:
    written(tmp_path / "a", [[1, 2, 3], [4, 5]], meta=None)
    data = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into(layout, data, offset, value)
    (tmp_path / "a.idx").write_bytes(data)
    with pytest.raises(InputError, match=rf"a\.idx: .*{message}"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize("entry", range(1, 8))
def test_a_step_back_is_seen_wherever_a_piece_ends(tmp_path: Path, entry: int) -> None:
    by_hand(tmp_path / "a", [[[n]] for n in range(8)])
    data = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into("<q", data, 34 + 12 * 8 + 8 * entry, entry - 2)
    (tmp_path / "a.idx").write_bytes(data)
    with patch("corpus.index.dataset.ENTRIES", 3), pytest.raises(InputError, match="document index"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize(("kind", "message"), [("i", "token 5 is -7, not a token id"), ("H", "token 5 is 65529")])
def test_verify_finds_ids_that_are_none(tmp_path: Path, kind: str, message: str) -> None:
    by_hand(tmp_path / "a", [[[0] * 5 + [-7 if kind == "i" else 65529]]], kind)
    if kind == "H":  # what other programs' uint16 mean is told by a PREFIX.json alone
        IndexedDataset(tmp_path / "a").verify()
        (tmp_path / "a.json").write_text('{"vocab_size": 50257, "end_of_text": 50256}')
    with patch("corpus.index.dataset._TOKENS", 2), pytest.raises(InputError, match=message):
        IndexedDataset(tmp_path / "a").verify()


def test_beyond_four_gigabytes_nothing_wraps(tmp_path: Path) -> None:
    """Two sequences of 2^31 - 1 tokens and a short one, 8 GiB in a sparse file."""
    longest = 2**31 - 1
    begins, end = pointers(np.array([longest, longest, 3], np.int32), 0, 2)
    assert begins.tolist() == [0, 2**32 - 2, 2**33 - 4] and end == 2**33 + 2
    assert pointers(np.array([longest], np.int32), end, 4)[1] == end + 4 * longest
    with open(tmp_path / "a.bin", "wb") as file:
        file.seek(2**33 - 6)
        file.write(struct.pack("<4H", 6, 7, 8, 9))
    (tmp_path / "a.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 3, 4)
        + struct.pack("<3i", longest, longest, 3)
        + struct.pack("<3q", *begins)
        + struct.pack("<4q", 0, 1, 2, 3)
    )
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset[2].tolist() == dataset.document(2).tolist() == [7, 8, 9]
    assert int(dataset[1][-1]) == 6 and len(dataset[1]) == longest
    assert os.stat(tmp_path / "a.bin").st_blocks < 1000
