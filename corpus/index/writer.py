"""Write a dataset in constant memory."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from common.errors import InputError
from common.files import output_files, scratch_file
from common.progress import Meter
from corpus.index.dataset import IndexedDataset
from corpus.index.layout import (
    CODES,
    DOCUMENTS,
    ENTRIES,
    HEADER,
    LONGEST,
    MAGIC,
    Meta,
    json_of,
    pointers,
    suffixed,
    with_checksums,
)

if TYPE_CHECKING:
    from corpus.index.documents import DocumentWriter


class IndexWriter:
    """Streams documents into PREFIX.bin and PREFIX.idx; the index appears last.

    With `table`, PREFIX.docs is written, too: every document must then be added with its row.

    Lengths go straight into the index, after space for its header. The document index, whose offset
    is known at the end, waits in an unnamed file. Memory does not grow.

    documents, sequences, tokens    written so far
    """

    def __init__(self, prefix: Path, dtype: npt.DTypeLike, meta: Meta | None = None, table: bool = False) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.meta = meta
        self.table: DocumentWriter | None = None
        self._suffixes = [".idx", *[".json"] * (meta is not None), *[DOCUMENTS] * table, ".bin"]
        self.documents = self.sequences = self.tokens = 0
        self._digest = xxhash.xxh3_64()

    def __enter__(self) -> "IndexWriter":
        with ExitStack() as stack:
            files = stack.enter_context(output_files([suffixed(self.prefix, suffix) for suffix in self._suffixes]))
            self._files = dict(zip(self._suffixes, files, strict=True))
            self._index_path = self._files[".idx"].temporary
            self._bin = stack.enter_context(self._files[".bin"].open())
            self._idx = stack.enter_context(self._files[".idx"].open())
            if DOCUMENTS in self._files:
                from corpus.index import documents  # knows URLs: training may lack tldextract

                self.table = documents.DocumentWriter(self.prefix.parent, stack)
            self._documents = stack.enter_context(scratch_file(self._index_path.parent))
            self._idx.write(bytes(HEADER.size))
            self._documents.write(bytes(8))  # the first document begins at sequence 0
            self._stack = stack.pop_all()
        return self

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append a document of one sequence, shape (tokens,); the empty document is allowed."""
        values = np.asarray(tokens)
        self.add_documents(values, [len(values)])

    def add_documents(self, tokens: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Append documents of one sequence each: the ids of all, end to end, and their lengths.

        Raises InputError for an id that does not fit the dtype, and for 2^31 tokens or more.
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        if sizes.size and sizes.max() > LONGEST:
            raise InputError(f"{self.prefix}: a document of {sizes.max():,} tokens; the format ends at {LONGEST:,}")
        values = np.asarray(tokens)
        assert values.shape == (sizes.sum(),)
        if values.size and (values.max() > np.iinfo(self.dtype).max or values.min() < 0):
            raise InputError(f"{self.prefix}: a token id does not fit {self.dtype.name}")
        self._add_tokens(np.ascontiguousarray(values, dtype=self.dtype))
        self._idx.write(sizes.astype("<i4").data)
        self._documents.write(np.arange(self.sequences + 1, self.sequences + len(sizes) + 1, dtype="<i8").data)
        self.sequences += len(sizes)
        self.documents += len(sizes)

    def add_index(self, other: IndexedDataset, meter: Meter | None = None) -> None:
        """Append all documents of another dataset of the same dtype, a few megabytes at a time.

        Verifies its tokens, so that damage never spreads: see `IndexedDataset.verified`.
        """
        assert other.dtype == self.dtype
        for part in other.verified():
            self._add_tokens(part)
            if meter:
                meter.advance(0, part.nbytes)
        for start in range(0, len(other), ENTRIES):
            self._idx.write(other.lengths[start : start + ENTRIES].data)
        for start in range(1, len(other.document_index), ENTRIES):
            self._documents.write((other.document_index[start : start + ENTRIES] + self.sequences).data)
        self.sequences += len(other)
        self.documents += other.n_documents

    def _add_tokens(self, values: npt.NDArray[np.generic]) -> None:
        self._bin.write(values.data)
        self._digest.update(values.data)
        self.tokens += len(values)

    def _finish(self) -> None:
        """Write everything after the lengths, then the header."""
        self._idx.flush()
        begin = 0
        with self._index_path.open("rb") as lengths:
            lengths.seek(HEADER.size)
            for start in range(0, self.sequences, ENTRIES):
                part = np.fromfile(lengths, "<i4", min(ENTRIES, self.sequences - start))
                begins, begin = pointers(part, begin, self.dtype.itemsize)
                self._idx.write(begins.data)
        assert begin == self.tokens * self.dtype.itemsize
        self._documents.seek(0)
        shutil.copyfileobj(self._documents, self._idx, 8 * ENTRIES)
        self._idx.seek(0)
        self._idx.write(HEADER.pack(MAGIC, 1, CODES[self.dtype], self.sequences, self.documents + 1))
        self._idx.flush()
        if self.meta is not None:
            meta = with_checksums(self._index_path, self.meta, self._digest.hexdigest())
            self._files[".json"].append(json_of(meta))
        if self.table is not None:
            assert self.table.documents == self.documents
            with self._files[DOCUMENTS].open() as file:
                self.table.finish(file, self._digest.hexdigest())
        # the other files of an older dataset must never lie beside the new tokens
        for suffix in (".idx", ".json", DOCUMENTS):
            suffixed(self.prefix, suffix).resolve().unlink(missing_ok=True)

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            self._stack.__exit__(*error)  # removes everything
            return
        with self._stack:  # renames .bin, then .json, then .idx; on an error removes everything
            self._finish()
