"""Datasets for the tests of the index: made by the writer, and byte by byte after the format's
table.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from corpus.index import IndexedDataset, IndexWriter, Meta

META = Meta(vocab_size=50257, end_of_text=50256)
CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "H": 8}  # of the struct module -> of the format


def written(
    prefix: Path, documents: Sequence[Sequence[int]], meta: Meta | None = META, dtype: str = "<u2"
) -> IndexedDataset:
    """A dataset of ours, written one document at a time."""
    with IndexWriter(prefix, dtype, meta) as index:
        for tokens in documents:
            index.add_document(np.array(tokens, np.int64))
    return IndexedDataset(prefix)


def by_hand(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], kind: str = "H", modes: Sequence[int] = ()
) -> Path:
    """A dataset as other programs write it: several sequences per document, no PREFIX.json."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    starts = [0, *accumulate(lengths)][: len(lengths)]
    firsts = [0, *accumulate(len(document) for document in documents)]
    tokens = [token for sequence in sequences for token in sequence]
    prefix.with_name(prefix.name + ".bin").write_bytes(struct.pack(f"<{len(tokens)}{kind}", *tokens))
    prefix.with_name(prefix.name + ".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, CODES[kind], len(sequences), len(documents) + 1)
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(starts)}q", *(start * struct.calcsize(f"<{kind}") for start in starts))
        + struct.pack(f"<{len(firsts)}q", *firsts)
        + struct.pack(f"<{len(modes)}b", *modes)
    )
    return prefix


def contents(dataset: IndexedDataset) -> list[list[list[int]]]:
    """The tokens of every sequence of every document."""
    edges = dataset.document_index.tolist()
    return [[dataset[sequence].tolist() for sequence in range(first, last)] for first, last in pairwise(edges)]


def files(prefix: Path) -> dict[str, bytes]:
    """The bytes of a dataset's files by suffix."""
    paths = {suffix: prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx", ".json")}
    return {suffix: path.read_bytes() for suffix, path in paths.items() if path.exists()}
