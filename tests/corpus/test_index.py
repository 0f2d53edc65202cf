import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InputError
from corpus.index import IndexedDataset, IndexWriter, Meta, inspect, read_meta, token_dtype
from tests.conftest import Command
from tests.helpers import assert_one_line_error

META = Meta(vocab_size=50257, end_of_text=50256)


def written(prefix: Path, documents: list[list[int]], meta: Meta | None = META) -> IndexedDataset:
    with IndexWriter(prefix, token_dtype(50257), meta) as index:
        for tokens in documents:
            index.add_document(tokens)
    return IndexedDataset(prefix)


def test_the_bytes_are_those_of_the_format_table(tmp_path: Path) -> None:
    written(tmp_path / "a", [[1, 2, 3], [], [50256]])
    expected = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 3, 4)
        + struct.pack("<3i", 3, 0, 1)
        + struct.pack("<3q", 0, 6, 6)
        + struct.pack("<4q", 0, 1, 2, 3)
    )
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 50256)


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
    assert dataset.tokens.tolist() == [token for tokens in documents for token in tokens]
    assert dataset.document_index.tolist() == list(range(len(documents) + 1))


@settings(max_examples=50)
@given(st.lists(st.lists(st.lists(st.integers(0, 50256)))))
def test_documents_added_together_or_one_by_one_are_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[list[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("index")
    written(folder / "one", [tokens for batch in batches for tokens in batch])
    with IndexWriter(folder / "many", np.uint16, META) as index:
        for batch in batches:
            tokens = np.array([token for tokens in batch for token in tokens], dtype=np.uint32)
            index.add_documents(tokens, [len(tokens) for tokens in batch])
    for suffix in (".bin", ".idx", ".json"):
        assert (folder / f"one{suffix}").read_bytes() == (folder / f"many{suffix}").read_bytes()


def test_a_document_longer_than_the_format_allows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a document of 2,147,483,648 tokens; the format ends at 2,147,483,647"):
        with IndexWriter(tmp_path / "a", np.uint16) as index:
            index.add_document(np.broadcast_to(np.uint16(1), 2**31))
    assert list(tmp_path.iterdir()) == []


def test_the_vocabulary_travels_with_the_dataset(tmp_path: Path) -> None:
    written(tmp_path / "a", [[1]])
    assert read_meta(tmp_path / "a") == META
    written(tmp_path / "b", [[1]], meta=None)
    assert read_meta(tmp_path / "b") is None
    (tmp_path / "a.json").write_text('{"size": 3}')
    with pytest.raises(InputError, match=r"a\.json"):
        read_meta(tmp_path / "a")


def test_large_vocabularies_take_four_bytes_a_token() -> None:
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


def test_a_token_that_does_not_fit_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    for token in (70000, -1):
        with pytest.raises(InputError, match="does not fit uint16"):
            written(tmp_path / "a", [[1], [token]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("change", ["cut", "grow", "empty"])
def test_files_of_the_wrong_size_are_refused(tmp_path: Path, suffix: str, change: str) -> None:
    written(tmp_path / "a", [[1, 2, 3], [4, 5]])
    path = tmp_path / f"a{suffix}"
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-1], "grow": data + b"xxx", "empty": b""}[change])
    with pytest.raises(InputError, match=rf"a\{suffix}"):
        IndexedDataset(tmp_path / "a")


@settings(max_examples=200)
@given(position=st.integers(0, 33), value=st.integers(0, 255))
def test_a_damaged_header_is_one_clear_error_or_no_damage(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    prefix = tmp_path_factory.mktemp("index") / "a"
    written(prefix, [[1, 2, 3], [4, 5]])
    data = bytearray(prefix.with_suffix(".idx").read_bytes())
    same = data[position] == value
    data[position] = value
    prefix.with_suffix(".idx").write_bytes(data)
    if same:
        IndexedDataset(prefix).verify()
    else:
        with pytest.raises(InputError, match=r"a\.(idx|bin)"):
            IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (34 + 8, "<q", 2, "pointer of sequence 0"),
        (34 + 8 + 16, "<q", 1, "document index"),
        (34 + 8 + 16 + 8, "<q", 5, "document index"),
    ],
)
def test_verify_names_what_contradicts_the_lengths(
    tmp_path: Path, offset: int, layout: str, value: int, message: str
) -> None:
    written(tmp_path / "a", [[1, 2, 3], [4, 5]])
    data = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into(layout, data, offset, value)
    (tmp_path / "a.idx").write_bytes(data)
    with pytest.raises(InputError, match=message):
        IndexedDataset(tmp_path / "a").verify()


def test_verify_finds_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    dataset = written(tmp_path / "a", [[1, 2], [3, 50300]])
    with pytest.raises(InputError, match="token 3 is 50300, outside the vocabulary of 50257"):
        dataset.verify()


def test_inspect_says_what_is_inside(tmp_path: Path, command: Command) -> None:
    dataset = written(tmp_path / "a", [[1] * 10, [2] * 1000])
    text = inspect(dataset)
    assert "documents   2" in text and "tokens      1,010" in text and "longest     1,000" in text
    result = command("corpus.index", "inspect", tmp_path / "a", "--verify")
    assert result.returncode == 0 and "verified" in result.stdout
    assert_one_line_error(command("corpus.index", "inspect", tmp_path / "a.idx"), "give the PREFIX without its suffix")
    assert_one_line_error(command("corpus.index", "inspect", tmp_path / "none"), "none.idx", "no such file")


def test_theirs_reads_ours_and_ours_reads_theirs(tmp_path: Path) -> None:
    theirs = pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed", exc_type=ImportError
    )
    documents = [[1, 2, 3], [50256], [7] * 100]
    written(tmp_path / "ours", documents)
    read = theirs.IndexedDataset(str(tmp_path / "ours"))
    assert [read[number].tolist() for number in range(len(documents))] == documents
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for tokens in documents:
        builder.add_document(np.array(tokens, dtype=np.uint16), [len(tokens)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    dataset = IndexedDataset(tmp_path / "theirs")
    dataset.verify()
    assert [dataset[number].tolist() for number in range(len(documents))] == documents
