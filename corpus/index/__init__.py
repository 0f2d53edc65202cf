"""Megatron's indexed dataset, PREFIX.bin and PREFIX.idx; `python -m corpus.index` inspects one.

`layout` shows the bytes (docs/formats.md explains them), `writer` writes them, `dataset` reads
them. `documents` is the table of where each document comes from, `ngrams` finds text in a dataset.
"""

from corpus.index.dataset import IndexedDataset
from corpus.index.layout import Meta, content_of, read_meta, suffixed, token_dtype
from corpus.index.writer import IndexWriter

__all__ = ["IndexWriter", "IndexedDataset", "Meta", "content_of", "read_meta", "suffixed", "token_dtype"]
