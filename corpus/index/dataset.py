"""Read a dataset through memory maps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from common.errors import InputError
from common.progress import Meter
from corpus.index.layout import DTYPES, ENTRIES, HEADER, MAGIC, arrays_at, index_checksum, pointers, read_meta, suffixed

_TOKENS = 1 << 19  # read at a time: 1 or 2 MB, which stay in the cache while they are verified


class IndexedDataset:
    """Reads PREFIX.bin/.idx through memory maps.

    dtype           numpy dtype of the tokens
    lengths         int32 (S,)    tokens of each sequence
    pointers        int64 (S,)    first byte of each sequence in PREFIX.bin
    document_index  int64 (D+1,)  first sequence of each document
    tokens          (T,)          all tokens, read-only, zero-copy

    Opening reads the whole index, in pieces, but not PREFIX.bin; `verify` reads that. Raises
    InputError if a file is missing or has the wrong size, if lengths, pointers and document index
    contradict each other, and if the checksum of PREFIX.idx or PREFIX.json is wrong.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        index, data = suffixed(prefix, ".idx"), suffixed(prefix, ".bin")
        for path in (index, data):
            if not path.is_file():
                hint = "; give the PREFIX without its suffix" if prefix.suffix in (".idx", ".bin") else ""
                raise InputError(f"{path}: no such file{hint or '; snakemake dataset or corpus.tokenize makes it'}")
        size = index.stat().st_size
        with open(index, "rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise InputError(f"{index}: not a Megatron index (it does not begin with MMIDIDX)")
        _, version, code, sequences, documents = HEADER.unpack(head)
        if version != 1 or code not in DTYPES:
            raise InputError(f"{index}: version {version}, dtype code {code}: only version 1, codes 1 to 8 are known")
        self.dtype = DTYPES[code]
        needed = HEADER.size + 12 * sequences + 8 * documents
        if size != needed or documents < 1:
            what = "with modes (multimodal data), which are not text" if size == needed + sequences else "damaged"
            raise InputError(f"{index}: {size} bytes where its header asks for {needed}; {what}, make it again")
        self.meta = meta = read_meta(prefix)
        if meta is not None and meta.checksum and index_checksum(index, meta) != meta.checksum:
            raise InputError(
                f"{index}: its checksum is not that of {suffixed(prefix, '.json').name}; one of the two is damaged or "
                "belongs to another dataset, make it again"
            )
        raw: npt.NDArray[np.uint8] = np.memmap(index, mode="r", dtype=np.uint8)
        self.lengths, self.pointers, self.document_index = arrays_at(
            raw, HEADER.size, ("<i4", sequences), ("<i8", sequences), ("<i8", documents)
        )
        size, total = data.stat().st_size, self._check_index(index)
        if size != total:
            raise InputError(f"{data}: {size} bytes where the index asks for {total}; make it again")
        # an empty file cannot be memory-mapped
        self.tokens: npt.NDArray[Any] = (
            np.memmap(data, mode="r", dtype=self.dtype) if total else np.empty(0, self.dtype)
        )

    def _check_index(self, index: Path) -> int:
        """Raise InputError if the arrays contradict each other; returns the size of PREFIX.bin."""
        end = 0
        for start in range(0, len(self), ENTRIES):
            lengths, given = self.lengths[start : start + ENTRIES], self.pointers[start : start + ENTRIES]
            if lengths.min() < 0:
                raise InputError(
                    f"{index}: sequence {start + int(np.argmax(lengths < 0))} has a negative length; "
                    "damaged, make it again"
                )
            expected, end = pointers(lengths, end, self.dtype.itemsize)
            if not np.array_equal(expected, given):
                wrong = int(np.argmax(expected != given))
                raise InputError(
                    f"{index}: pointer of sequence {start + wrong} is {given[wrong]}, but it begins at "
                    f"{expected[wrong]}; damaged, make it again"
                )
        documents = self.document_index
        parts = (documents[start : start + ENTRIES + 1] for start in range(0, len(documents), ENTRIES))
        if documents[0] != 0 or documents[-1] != len(self) or any((part[1:] < part[:-1]).any() for part in parts):
            raise InputError(f"{index}: document index is not 0 to {len(self)} in order; damaged, make it again")
        return end

    @property
    def n_documents(self) -> int:
        """Number of documents, each of one or more sequences."""
        return len(self.document_index) - 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        """Tokens of one sequence, a view into the file, shape (lengths[sequence],)."""
        start = int(self.pointers[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[sequence])]

    def document(self, number: int) -> npt.NDArray[Any]:
        """Tokens of one document with all its sequences, a view into the file."""
        first, last = self.document_index[number : number + 2].tolist()
        if first == last:
            return self.tokens[:0]
        begin = int(self.pointers[first]) // self.dtype.itemsize
        end = int(self.pointers[last - 1]) // self.dtype.itemsize + int(self.lengths[last - 1])
        return self.tokens[begin:end]

    def verified(self) -> Iterator[npt.NDArray[Any]]:
        """All tokens in order, a megabyte or two at a time.

        Raises InputError at the first id that is negative or outside the vocabulary of PREFIX.json,
        and at the end if the checksum of PREFIX.json is wrong. Both can be checked only if that
        file names them.
        """
        data, digest = suffixed(self.prefix, ".bin"), xxhash.xxh3_64()
        limit = 1 << 64 if self.dtype.kind == "f" else np.iinfo(self.dtype).max + 1
        if self.meta is not None:
            limit = self.meta.vocab_size
        with open(data, "rb") as file:  # plain reads: pages of the memory map would count as our memory
            for start in range(0, len(self.tokens), _TOKENS):
                part = np.fromfile(file, self.dtype, min(_TOKENS, len(self.tokens) - start))
                ids = part.view(f"<u{self.dtype.itemsize}")  # a negative id becomes a large one
                if ids.max() >= limit:
                    where = int(np.argmax(ids >= limit))
                    what = f"outside the vocabulary of {limit}" if self.meta else "not a token id"
                    raise InputError(f"{data}: token {start + where} is {part[where]}, {what}; make the dataset again")
                digest.update(part.data)
                yield part
        if self.meta is not None and self.meta.bin not in ("", digest.hexdigest()):
            raise InputError(
                f"{data}: its checksum is not that of {suffixed(self.prefix, '.json').name}; damaged, make it again"
            )

    def verify(self) -> None:
        """Read every token; raises InputError like `verified`."""
        with Meter("verify", "tokens", len(self.tokens)) as meter:
            for part in self.verified():
                meter.advance(len(part), part.nbytes)
