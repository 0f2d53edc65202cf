"""Megatron's indexed dataset: PREFIX.bin holds the tokens, PREFIX.idx says where documents begin.

    python -m corpus.index inspect results/demo/dataset/corpus_text_document
    python -m corpus.index inspect results/demo/dataset/corpus_text_document --verify

PREFIX is the full name without `.bin` or `.idx`. `--verify` reads every token and exits 2 at the first fault.
"""

# PREFIX.idx, little-endian, arrays unaligned behind a 34-byte header (source: megatron-core IndexedDataset):
#
#   offset  type                   content
#        0  9 bytes                MMIDIDX\0\0
#        9  u64                    version = 1
#       17  u8                     dtype code: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
#       18  u64                    S, number of sequences
#       26  u64                    D + 1, documents and a closing entry
#       34  i32[S]                 length of each sequence, in tokens
#           i64[S]                 where each sequence begins in PREFIX.bin, in bytes
#           i64[D + 1]             first sequence of each document, from 0; the last entry is S
#           i8[S]                  optional modes (multimodal data), ignored
#
# PREFIX.bin is the tokens and nothing else. PREFIX.json is ours: the vocabulary the tokens belong to.

import struct
import sys
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from common import cli
from common.errors import InputError
from common.files import atomic_path, read_json, write_json

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LONGEST = 2**31 - 1  # tokens of a sequence: lengths are int32
_SCAN = 1 << 22  # tokens looked at in one go while verifying


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 below 65,500 entries, else int32: the rule of the programs that read these files."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def suffixed(prefix: Path, suffix: str) -> Path:
    """PREFIX plus `.bin`, `.idx` or `.json`; a dot inside the prefix's own name is left alone."""
    return prefix.with_name(prefix.name + suffix)


@dataclass(frozen=True)
class Meta:
    """The vocabulary behind a dataset's tokens (PREFIX.json)."""

    vocab_size: int
    """True entries, padding not counted."""
    end_of_text: int
    """Id of the token that closes a document."""


def read_meta(prefix: Path) -> Meta | None:
    """The vocabulary of a dataset of ours; None for one made elsewhere (no PREFIX.json)."""
    path = suffixed(prefix, ".json")
    if not path.exists():
        return None
    try:
        return Meta(**read_json(path))
    except TypeError:
        raise InputError(f"{path}: not a description of a dataset; make the dataset again or remove it") from None


class IndexWriter:
    """Streams documents into PREFIX.bin and PREFIX.idx; the index appears last, so a dataset with one is whole.

    Memory: 4 bytes a document for its length, 8 for its place in the document index.
    """

    def __init__(self, prefix: Path, dtype: npt.DTypeLike, meta: Meta | None = None) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.meta = meta
        self.tokens = 0
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._stack = ExitStack()

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self._documents) - 1

    def __enter__(self) -> "IndexWriter":
        self._idx = self._stack.enter_context(atomic_path(suffixed(self.prefix, ".idx")))
        self._bin = self._stack.enter_context(
            self._stack.enter_context(atomic_path(suffixed(self.prefix, ".bin"))).open("wb")
        )
        return self

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append a document of one sequence, shape (tokens,); the empty document is allowed."""
        values = np.asarray(tokens)
        self.add_documents(values, [len(values)])

    def add_documents(self, tokens: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Append documents of one sequence each: the ids of all laid end to end, and how many belong to each.

        Raises InputError for an id that does not fit the dtype and a document of 2^31 tokens or more.
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        if sizes.size and sizes.max() > _LONGEST:
            raise InputError(f"{self.prefix}: a document of {sizes.max():,} tokens; the format ends at {_LONGEST:,}")
        values = np.asarray(tokens)
        assert values.shape == (sizes.sum(),)
        if values.size and (values.max() > np.iinfo(self.dtype).max or values.min() < 0):
            raise InputError(f"{self.prefix}: a token id does not fit {self.dtype.name}")
        self._bin.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        self.tokens += values.size
        first = len(self._lengths)
        self._lengths.frombytes(sizes.astype(np.int32).tobytes())
        self._documents.frombytes(np.arange(first + 1, first + sizes.size + 1, dtype=np.int64).tobytes())

    def add_index(self, other: "IndexedDataset") -> None:
        """Append all documents of another dataset of the same dtype, a few megabytes at a time."""
        if other.dtype != self.dtype:
            raise InputError(
                f"{other.prefix}: tokens are {other.dtype.name}, the others {self.dtype.name}; "
                "tokenize all shards with one vocabulary"
            )
        first = len(self._lengths)
        for start in range(0, len(other.tokens), _SCAN):
            self._bin.write(other.tokens[start : start + _SCAN].tobytes())
        self.tokens += len(other.tokens)
        self._lengths.frombytes(other.lengths.astype(np.int32).tobytes())
        self._documents.frombytes((other.document_index[1:].astype(np.int64) + first).tobytes())

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        with self._idx.open("wb") as file:
            file.write(HEADER.pack(MAGIC, 1, _CODES[self.dtype], len(lengths), len(self._documents)))
            file.write(lengths.astype("<i4", copy=False).tobytes())
            file.write(pointers.tobytes())
            file.write(np.frombuffer(self._documents, dtype=np.int64).astype("<i8", copy=False).tobytes())
        if self.meta is not None:
            write_json(suffixed(self.prefix, ".json"), asdict(self.meta))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self._write_index()
            except BaseException:
                self._stack.__exit__(*sys.exc_info())
                raise
        self._stack.__exit__(kind, error, trace)  # renames .bin, then .idx; on an error removes both


class IndexedDataset:
    """Reads PREFIX.bin/.idx through memory maps.

    dtype           numpy dtype of the tokens
    lengths         int32 (S,)    tokens of each sequence
    pointers        int64 (S,)    first byte of each sequence in PREFIX.bin
    document_index  int64 (D+1,)  first sequence of each document
    tokens          (T,)          all tokens, read-only, zero-copy

    Raises InputError when a file is missing, truncated or no index.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        index, data = suffixed(prefix, ".idx"), suffixed(prefix, ".bin")
        for path in (index, data):
            if not path.is_file():
                hint = "; give the PREFIX without its suffix" if prefix.suffix in (".idx", ".bin") else ""
                raise InputError(f"{path}: no such file{hint}")
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
        if size not in (needed, needed + sequences) or documents < 1:
            raise InputError(f"{index}: {size} bytes where its header asks for {needed}; damaged, make it again")
        raw: npt.NDArray[np.uint8] = np.memmap(index, mode="r", dtype=np.uint8)
        self.lengths: npt.NDArray[np.int32] = self._array(raw, "<i4", sequences, HEADER.size)
        self.pointers: npt.NDArray[np.int64] = self._array(raw, "<i8", sequences, HEADER.size + 4 * sequences)
        self.document_index: npt.NDArray[np.int64] = self._array(raw, "<i8", documents, HEADER.size + 12 * sequences)
        found, total = data.stat().st_size, int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        if found != total:
            raise InputError(f"{data}: {found} bytes where the index asks for {total}; make it again")
        # an empty file cannot be mapped
        self.tokens: npt.NDArray[Any] = (
            np.memmap(data, mode="r", dtype=self.dtype) if total else np.empty(0, self.dtype)
        )

    @staticmethod
    def _array(raw: npt.NDArray[np.uint8], dtype: str, count: int, offset: int) -> npt.NDArray[Any]:
        return np.frombuffer(raw, dtype=dtype, count=count, offset=offset)

    @property
    def n_documents(self) -> int:
        """Documents, whatever the number of sequences in each."""
        return len(self.document_index) - 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        """Tokens of one sequence, a view into the file, shape (lengths[sequence],)."""
        start = int(self.pointers[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[sequence])]

    def verify(self) -> None:
        """Check everything an index promises; InputError names the first fault.

        Pointers follow from the lengths, documents begin at 0, never go back and end at the last sequence, token
        ids are inside the vocabulary where PREFIX.json tells it.
        """
        index = suffixed(self.prefix, ".idx")
        if np.any(self.lengths < 0):
            raise InputError(f"{index}: sequence {int(np.argmax(self.lengths < 0))} has a negative length")
        expected = np.zeros(len(self), dtype=np.int64)
        np.cumsum(self.lengths[:-1], dtype=np.int64, out=expected[1:])
        if len(self) and not np.array_equal(expected * self.dtype.itemsize, self.pointers):
            wrong = int(np.argmax(expected * self.dtype.itemsize != self.pointers))
            raise InputError(f"{index}: pointer of sequence {wrong} is {self.pointers[wrong]}, not where it begins")
        documents = self.document_index
        if documents[0] != 0 or documents[-1] != len(self) or np.any(np.diff(documents) < 0):
            raise InputError(f"{index}: the document index does not run from 0 to {len(self)} in order")
        meta = read_meta(self.prefix)
        for start in range(0, len(self.tokens), _SCAN) if meta else ():
            part = self.tokens[start : start + _SCAN]
            if meta and int(part.max()) >= meta.vocab_size:
                where = start + int(np.argmax(part >= meta.vocab_size))
                raise InputError(
                    f"{suffixed(self.prefix, '.bin')}: token {where} is {self.tokens[where]}, "
                    f"outside the vocabulary of {meta.vocab_size}"
                )


def inspect(dataset: IndexedDataset) -> str:
    """What a person wants to know about a dataset, a line a fact."""
    lengths, meta = dataset.lengths, read_meta(dataset.prefix)
    rows = {
        "documents": f"{dataset.n_documents:,}",
        "sequences": f"{len(dataset):,}",
        "tokens": f"{len(dataset.tokens):,}",
        "dtype": dataset.dtype.name,
        "shortest": f"{lengths.min() if len(lengths) else 0:,} tokens",
        "longest": f"{lengths.max() if len(lengths) else 0:,} tokens",
        "vocabulary": f"{meta.vocab_size:,}, end of text {meta.end_of_text}" if meta else "unknown (no .json)",
    }
    return "\n".join(f"{name:<12}{value}" for name, value in rows.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.index", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("inspect", help="print what a dataset holds")
    command.add_argument("prefix", type=Path, metavar="PREFIX")
    command.add_argument("--verify", action="store_true", help="check every array and token")
    arguments = parser.parse_args(argv)
    dataset = IndexedDataset(arguments.prefix)
    print(inspect(dataset))
    if arguments.verify:
        dataset.verify()
        print("verified")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
