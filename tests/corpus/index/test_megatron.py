"""Read their datasets and let them read ours; needs `pip install --no-deps megatron-core`."""

import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus.index import IndexedDataset, IndexWriter
from corpus.merge_index import merge_index
from tests.corpus.index.helpers import META, contents, files

SEVERAL = [[], [[]], [[1, 2], [3]], [[4], [], [50256]], [[7] * 100]]


@pytest.fixture(scope="module")
def megatron() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages it would like to find, and of torch's about itself
        return pytest.importorskip(
            "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed", exc_type=ImportError
        )


def theirs(megatron: Any, prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: type) -> Path:
    """A dataset by their builder."""
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        tokens = np.array([token for sequence in document for token in sequence], dtype)
        builder.add_document(tokens, [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")
    return prefix


def read_by_them(megatron: Any, prefix: Path) -> list[list[Any]]:
    """The sequences of each document as lists."""
    dataset = megatron.IndexedDataset(str(prefix))
    sequences = [dataset[n].tolist() for n in range(len(dataset))]
    return [sequences[first:last] for first, last in pairwise(dataset.document_indices.tolist())]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_theirs_reads_what_we_write_and_what_we_merge(megatron: Any, tmp_path: Path, dtype: type) -> None:
    documents = [[], [1, 2, 3], [50256], [], [7] * 100]
    with IndexWriter(tmp_path / "ours", dtype, META) as index:
        index.add_documents([token for document in documents for token in document], [len(d) for d in documents])
    expected = [[document] for document in documents]
    assert read_by_them(megatron, tmp_path / "ours") == expected
    theirs(megatron, tmp_path / "same", expected, dtype)
    ours, same = files(tmp_path / "ours"), files(tmp_path / "same")
    assert (ours[".bin"], ours[".idx"]) == (same[".bin"], same[".idx"])
    merge_index([tmp_path / "ours", tmp_path / "ours"], tmp_path / "all")
    assert read_by_them(megatron, tmp_path / "all") == expected * 2


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_ours_reads_what_they_write_and_merges_to_their_bytes(megatron: Any, tmp_path: Path, dtype: type) -> None:
    inputs = [theirs(megatron, tmp_path / f"{n}", part, dtype) for n, part in enumerate((SEVERAL, [], SEVERAL))]
    builder = megatron.IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=dtype)
    for prefix in inputs:
        builder.add_index(str(prefix))
    builder.finalize(f"{tmp_path}/theirs.idx")
    for prefix, documents in ((inputs[0], SEVERAL), (tmp_path / "theirs", SEVERAL * 2)):
        dataset = IndexedDataset(prefix)
        dataset.verify()
        assert dataset.dtype == dtype and contents(dataset) == documents
    merge_index(inputs, tmp_path / "ours")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
