"""Read their datasets and let them read ours; needs `pip install --no-deps megatron-core`."""

import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus.index import IndexedDataset, IndexWriter
from corpus.merge_index import merge_index
from tests.corpus.index.helpers import META, contents, files

SEVERAL = [[], [[]], [[1, 2], [3]], [[4], [], [50256]], [[7] * 100]]
DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 50256), max_size=5), max_size=3), max_size=6)


@pytest.fixture(scope="module")
def megatron() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages it would like to find, and of torch's about itself
        return pytest.importorskip(
            "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed", exc_type=ImportError
        )


def theirs(
    megatron: Any, prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: type = np.uint16, modes: int = 0
) -> Path:
    """A dataset by their builder; with `modes`, sequence n of a document has mode n % modes."""
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=modes > 0)
    for document in documents:
        tokens = [token for sequence in document for token in sequence]
        lengths = [len(sequence) for sequence in document]
        builder.add_document(
            np.array(tokens, dtype), lengths, [n % modes for n in range(len(document))] if modes else None
        )
    builder.finalize(f"{prefix}.idx")
    return prefix


def merged_by_them(megatron: Any, prefix: Path, inputs: list[Path], dtype: type, multimodal: bool = False) -> Path:
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for name in inputs:
        builder.add_index(str(name))
    builder.finalize(f"{prefix}.idx")
    return prefix


def read_by_them(megatron: Any, prefix: Path, multimodal: bool = False) -> list[list[Any]]:
    """The sequences of each document as lists, with their modes if there are any."""
    dataset = megatron.IndexedDataset(str(prefix), multimodal=multimodal)
    edges = dataset.document_indices.tolist()
    sequences = [dataset[n] for n in range(len(dataset))]
    plain = [(s[0].tolist(), int(s[1])) if multimodal else s.tolist() for s in sequences]
    return [plain[first:last] for first, last in pairwise(edges)]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_theirs_reads_what_we_write_and_what_we_merge(megatron: Any, tmp_path: Path, dtype: type) -> None:
    documents = [[], [1, 2, 3], [50256], [], [7] * 100]
    with IndexWriter(tmp_path / "ours", dtype, META) as index:
        index.add_documents([token for document in documents for token in document], [len(d) for d in documents])
    expected = [[document] for document in documents]
    assert read_by_them(megatron, tmp_path / "ours") == expected
    merge_index([tmp_path / "ours", tmp_path / "ours"], tmp_path / "all")
    assert read_by_them(megatron, tmp_path / "all") == expected * 2


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_ours_reads_what_they_write_and_what_they_merge(megatron: Any, tmp_path: Path, dtype: type) -> None:
    first, second = (theirs(megatron, tmp_path / name, SEVERAL, dtype) for name in "ab")
    merged_by_them(megatron, tmp_path / "all", [first, second], dtype)
    for prefix, documents in ((first, SEVERAL), (tmp_path / "all", SEVERAL * 2)):
        dataset = IndexedDataset(prefix)
        dataset.verify()
        assert dataset.dtype == dtype and contents(dataset) == documents


def test_modes_go_both_ways(megatron: Any, tmp_path: Path) -> None:
    first, second = (theirs(megatron, tmp_path / name, SEVERAL, modes=2) for name in "ab")
    dataset = IndexedDataset(first)
    assert contents(dataset) == SEVERAL and dataset.modes is not None
    assert dataset.modes.tolist() == [0, 0, 1, 0, 1, 0, 0]
    merge_index([first, second], tmp_path / "ours")
    assert read_by_them(megatron, tmp_path / "ours", multimodal=True) == 2 * [
        [(sequence, n % 2) for n, sequence in enumerate(document)] for document in SEVERAL
    ]


@settings(max_examples=4)
@given(st.lists(DOCUMENTS, min_size=1, max_size=4), st.sampled_from([np.uint16, np.int32]), st.sampled_from([0, 3]))
def test_their_merged_bytes_are_ours(
    megatron: Any,
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[list[list[list[int]]]],
    dtype: type,
    modes: int,
) -> None:
    folder = tmp_path_factory.mktemp("index")
    shards.append([[[1]]])  # a merge without documents is an error of ours
    inputs = [theirs(megatron, folder / f"{n}", documents, dtype, modes) for n, documents in enumerate(shards)]
    merged_by_them(megatron, folder / "theirs", inputs, dtype, multimodal=modes > 0)
    with patch("common.files.writing.fsync"):
        merge_index(inputs, folder / "ours")
    assert files(folder / "ours") == files(folder / "theirs")
