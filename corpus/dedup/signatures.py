"""Phase 1, one job per shard: each document's signature and compressed text, for the phases after it.

Segments, one row per document, 65,536 rows at a time:

| name | dtype | content |
|---|---|---|
| key | u64 | hash of id and text: the order in which documents are compared, whatever the shards |
| exact | u64 | hash of the normalised text |
| size | i64 | characters |
| band0, band1, … | u64 | hash of the MinHash values of a band |
| ids, ids_end | bytes, i64 | ids, and the end of each |
| texts, texts_end | bytes, i64 | texts, each a zstd frame with a checksum, and the end of each |
"""

import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from common.errors import InputError
from common.files import BadLines, Document, read_documents, short_hash
from common.progress import Meter
from common.settings import DedupSettings
from common.workers import Workers, batched
from corpus.dedup.segments import Segments, write_segments
from corpus.dedup.shingles import MinHasher, band_hashes

_BATCH = 64  # documents sent to a worker at once
CHUNK = 1 << 16  # documents in a segment
_COLUMNS = {"key": "<u8", "exact": "<u8", "size": "<i8", "ids_end": "<i8", "texts_end": "<i8"}


def normalised(text: str) -> str:
    """The form in which exact duplicates are equal: NFKC, case and white space folded."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def fingerprint(settings: DedupSettings) -> dict[str, Any]:
    """The settings that shape shingles and signatures: files of all phases must agree in them."""
    return settings.model_dump(include={"shingle_characters", "shingle_words", "bands", "rows", "seed"}, mode="json")


@lru_cache(1)
def _hasher(settings: str) -> MinHasher:
    return MinHasher(DedupSettings.model_validate_json(settings))


def describe(settings: DedupSettings, documents: Sequence[Document]) -> dict[str, Any]:
    """The columns of some documents; `ids` and `texts` as lists of bytes, `bands` of shape (N, bands)."""
    hasher, compressor = _hasher(settings.model_dump_json()), zstandard.ZstdCompressor(level=1, write_checksum=True)
    signatures = np.empty((len(documents), settings.bands * settings.rows), dtype=np.uint32)
    ids, texts, key, exact = [], [], [], []
    for row, document in enumerate(documents):
        text = document["text"].encode()
        ids.append(document["id"].encode())
        texts.append(compressor.compress(text))
        key.append(xxhash.xxh3_64_intdigest(ids[-1] + b"\0" + text))
        exact.append(xxhash.xxh3_64_intdigest(normalised(document["text"]).encode()))
        signatures[row] = hasher.signature(document["text"])
    return {
        "ids": ids,
        "texts": texts,
        "key": np.array(key, dtype=np.uint64),
        "exact": np.array(exact, dtype=np.uint64),
        "size": np.array([len(document["text"]) for document in documents], dtype=np.int64),
        "bands": band_hashes(signatures, settings),
    }


def write_signatures(
    shard: Path, output: Path, settings: DedupSettings, pool: Workers, max_bad_share: float = 0.001
) -> int:
    """Write the signatures of a shard; returns the number of documents. Raises InputError for unreadable input."""
    bad = BadLines(max_bad_share)
    info: dict[str, Any] = {"settings": fingerprint(settings), "documents": 0, "bad_lines": 0}
    described = pool.map(partial(describe, settings), batched(read_documents(shard, bad), _BATCH))
    with write_segments(output, info) as file, Meter("dedup signatures", "documents") as meter:
        for parts in batched(described, CHUNK // _BATCH):
            for name in ("key", "exact", "size"):
                file.append(name, np.concatenate([part[name] for part in parts]))
            bands = np.concatenate([part["bands"] for part in parts])
            for band in range(settings.bands):
                file.append(f"band{band}", bands[:, band])
            for name in ("ids", "texts"):
                blobs = [blob for part in parts for blob in part[name]]
                file.append(name, np.frombuffer(b"".join(blobs), dtype=np.uint8))
                file.append(f"{name}_end", np.cumsum([len(blob) for blob in blobs], dtype=np.int64))
            info["documents"] += len(bands)
            meter.advance(len(bands))
        bad.check()
        info["bad_lines"] = bad.bad
    return int(info["documents"])


class Signatures:
    """The signatures of all shards. A document's row is its index in the shards, concatenated in order of name."""

    def __init__(self, paths: Sequence[Path], settings: DedupSettings) -> None:
        self.shards = [Segments(path) for path in sorted(paths, key=lambda path: path.name)]
        for shard in self.shards:
            if shard.info.get("settings") != fingerprint(settings):
                raise InputError(f"{shard.path}: made with other settings of dedup; run the phase `signatures` again")
        counts = [shard.info["documents"] for shard in self.shards]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        """First row of each shard, then the number of documents: shape (shards + 1,)."""
        self.count = int(self.starts[-1])
        names = [(shard.path.name, shard.checksum) for shard in self.shards]
        self.digest = short_hash(repr(names))
        """Identifies the content of all shards, which the rows in pairs and edges refer to."""

    def __enter__(self) -> "Signatures":
        return self

    def __exit__(self, *_: object) -> None:
        for shard in self.shards:
            shard.close()

    def check(self, file: Segments) -> None:
        """Raise InputError for a file of a later phase that was made from other signatures."""
        if file.info.get("signatures") != self.digest:
            raise InputError(f"{file.path}: made from other signatures; delete it and run its phase again")

    def columns(self, *names: str) -> Iterator[tuple[int, list[NDArray[Any]]]]:
        """(first row, values of the columns), one segment at a time."""
        for start, shard in zip(self.starts.tolist(), self.shards, strict=False):
            row = start
            for arrays in zip(*(shard.each(name) for name in names), strict=True):
                yield row, list(arrays)
                row += len(arrays[0])

    def _at(self, name: str, rows: NDArray[np.int64]) -> Iterator[tuple[Segments, int, NDArray[Any], NDArray[Any]]]:
        """(shard, number of the segment, a column's segment, indices in it) of some rows in ascending order."""
        for start, shard in zip(self.starts.tolist(), self.shards, strict=False):
            low, high = np.searchsorted(rows, [start, start + shard.info["documents"]])
            for number, array in enumerate(shard.each(name) if high > low else ()):
                first = start + number * CHUNK
                low, high = np.searchsorted(rows, [first, first + len(array)])
                yield shard, number, array, rows[low:high] - first

    def values(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """A column at some rows in ascending order."""
        found = [array[indices] for _, _, array, indices in self._at(name, rows)]
        return np.concatenate([np.empty(0, dtype=_COLUMNS[name]), *found])

    def blobs(self, name: str, rows: NDArray[np.int64]) -> Iterator[bytes]:
        """The ids, or the texts (decompressed UTF-8), of some rows in ascending order, read shard by shard."""
        decompressor = zstandard.ZstdDecompressor()
        for shard, number, ends, indices in self._at(f"{name}_end", rows):
            offset = shard.offsets(name)[number]
            for index in indices.tolist():
                begin = int(ends[index - 1]) if index else 0
                blob = shard.bytes_at(offset + begin, int(ends[index]) - begin)
                try:
                    yield decompressor.decompress(blob) if name == "texts" else blob
                except zstandard.ZstdError as error:
                    raise InputError(f"{shard.path}: damaged text ({error}); make the file again") from None
