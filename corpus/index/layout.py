"""The bytes of a dataset: PREFIX.bin holds tokens, PREFIX.idx documents, PREFIX.json checksums.

PREFIX is the full name without `.bin` or `.idx`.
"""

# PREFIX.idx, little-endian, unaligned arrays after 34 bytes (source: megatron-core IndexedDataset):
#
#   offset  type                   content
#        0  9 bytes                MMIDIDX\0\0
#        9  u64                    version = 1
#       17  u8                     dtype code: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
#       18  u64                    S, number of sequences
#       26  u64                    D + 1, documents and a closing entry
#       34  i32[S]                 length of each sequence, in tokens
#           i64[S]                 byte offset of each sequence in PREFIX.bin
#           i64[D + 1]             first sequence of each document, from 0; the last entry is S
#
# Datasets with a mode per sequence (multimodal data) are refused.
#
# PREFIX.bin has only tokens. PREFIX.json holds their vocabulary and two checksums:
#
#   vocab_size, end_of_text, vocabulary    see Meta
#   bin                            xxh3_64 of PREFIX.bin, 16 hex digits
#   checksum                       xxh3_64 of PREFIX.idx and "{vocab_size} {end_of_text} {bin}"

import struct
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from common.errors import InputError
from common.files import read_json

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
DOCUMENTS = ".docs"  # suffix of the table that `documents` reads and writes
RECORDS = ".records"  # suffix of the list of records of a crawl's archive, after the archive's own
LONGEST = 2**31 - 1  # tokens per sequence: lengths are int32
ENTRIES = 1 << 18  # array entries processed at a time: 2 MB
_SMALL = 256 << 20  # bytes: a PREFIX.bin up to this size is read in full, in about a second
_PIECE = 64 << 10
_PIECES = 1024


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 below 65,500 entries, else int32: the rule of the programs that read these files."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def suffixed(prefix: Path, suffix: str) -> Path:
    """PREFIX plus `.bin`, `.idx` or `.json`; keeps a dot in the prefix's name."""
    return prefix.with_name(prefix.name + suffix)


def arrays_at(data: Any, offset: int, *arrays: tuple[str, int]) -> list[npt.NDArray[Any]]:
    """The arrays of these dtypes and lengths that follow each other in `data` from a byte on."""
    views = []
    for kind, length in arrays:
        views.append(np.frombuffer(data, kind, length, offset))
        offset += views[-1].nbytes
    return views


def pointers(lengths: npt.NDArray[np.int32], begin: int, itemsize: int) -> tuple[npt.NDArray[np.int64], int]:
    """Byte offsets of sequences of these lengths from byte `begin` on, and the end of the last."""
    sizes = lengths.astype(np.int64) * itemsize
    ends = np.cumsum(sizes) + begin
    return ends - sizes, int(ends[-1]) if len(ends) else begin


@dataclass(frozen=True)
class Meta:
    """PREFIX.json: the vocabulary of a dataset's tokens. Has no checksums if a person wrote it."""

    vocab_size: int
    """Entries without padding."""
    end_of_text: int
    """Id of the token that closes a document."""
    vocabulary: str = field(default="", compare=False)
    """Hash of its merges (`Tokenizer.vocabulary.hash`); empty if not known."""
    bin: str = field(default="", compare=False)
    checksum: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"vocabulary of {self.vocab_size}, end of text {self.end_of_text}"


def read_meta(prefix: Path) -> Meta | None:
    """PREFIX.json, or None if it does not exist: a dataset of another tool.

    Raises InputError if it is damaged.
    """
    path = suffixed(prefix, ".json")
    if not path.exists():
        return None
    values = read_json(path)
    kinds = {"vocab_size": int, "end_of_text": int, "vocabulary": str, "bin": str, "checksum": str}
    if (
        not isinstance(values, dict)
        or not {"vocab_size", "end_of_text"} <= set(values) <= set(kinds)
        or not all(isinstance(value, kinds[name]) for name, value in values.items())
    ):
        raise InputError(f"{path}: not a description of a dataset; make the dataset again or remove it")
    return Meta(**values)


def index_checksum(index: Path, meta: Meta) -> str:
    """`checksum` of PREFIX.json."""
    digest = xxhash.xxh3_64()
    with open(index, "rb") as file:
        while part := file.read(8 * ENTRIES):
            digest.update(part)
    digest.update(f"{meta.vocab_size} {meta.end_of_text} {meta.bin}".encode())
    return digest.hexdigest()


def with_checksums(index: Path, meta: Meta, bin_checksum: str) -> Meta:
    """The description with the checksums of a finished PREFIX.idx and PREFIX.bin."""
    meta = replace(meta, bin=bin_checksum)
    return replace(meta, checksum=index_checksum(index, meta))


def json_of(meta: Meta) -> bytes:
    """The content of PREFIX.json."""
    return orjson.dumps(asdict(meta), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def content_of(prefix: Path) -> str:
    """A checksum of PREFIX.bin, which does not depend on where the files lie.

    "xxh3:…"     of the whole file: computed if it is small, else taken from PREFIX.json
    "sampled:…"  of its size and 1,024 evenly spaced pieces of 64 kB: if there is no PREFIX.json
    """
    path = suffixed(prefix, ".bin")
    size = path.stat().st_size
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        if size <= _SMALL:
            while part := file.read(1 << 20):
                digest.update(part)
            return f"xxh3:{digest.hexdigest()}"
        meta = read_meta(prefix)
        if meta is not None and meta.bin:
            return f"xxh3:{meta.bin}"
        digest.update(str(size).encode())
        for start in np.linspace(0, size - _PIECE, _PIECES).astype(np.int64).tolist():
            file.seek(start)
            digest.update(file.read(_PIECE))
    return f"sampled:{digest.hexdigest()}"
