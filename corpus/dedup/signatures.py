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
from collections.abc import Iterable, Iterator, Sequence
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
    shard: Path, output: Path, settings: DedupSettings, workers: int = 1, max_bad_share: float = 0.001
) -> int:
    """Write the signatures of a shard; returns the number of documents. Raises InputError for unreadable input."""
    with Workers(workers) as pool:
        (count,) = describe_shards([shard], [output], settings, pool, max_bad_share)
    return count


def describe_shards(
    shards: Sequence[Path], outputs: Sequence[Path], settings: DedupSettings, pool: Workers, max_bad_share: float
) -> list[int]:
    """Write the signatures of each shard; returns the documents per shard. Raises InputError for unreadable input."""
    bad = [BadLines(max_bad_share) for _ in shards]
    batches = [batched(read_documents(shard, lines), _BATCH) for shard, lines in zip(shards, bad, strict=True)]
    described = pool.map_groups(partial(describe, settings), batches)
    counts = []
    with Meter("dedup signatures", "documents") as meter:
        for output, lines, parts in zip(outputs, bad, described, strict=True):
            counts.append(_write(output, settings, parts, lines, meter))
    return counts


def _write(
    output: Path, settings: DedupSettings, described: Iterable[dict[str, Any]], bad: BadLines, meter: Meter
) -> int:
    """Write the columns of a shard; returns the number of documents."""
    info: dict[str, Any] = {"settings": fingerprint(settings), "documents": 0, "bad_lines": 0}
    with write_segments(output, info) as file:
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

    def values(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """A column at some rows in ascending order."""
        found = [np.empty(0, dtype=_COLUMNS[name])]
        for start, shard in zip(self.starts.tolist(), self.shards, strict=False):
            for number, array in (
                enumerate(shard.each(name)) if _any_between(rows, start, shard.info["documents"]) else ()
            ):
                first = start + number * CHUNK
                low, high = np.searchsorted(rows, [first, first + len(array)])
                found.append(array[rows[low:high] - first])
        return np.concatenate(found)

    def blobs(self, name: str, rows: NDArray[np.int64]) -> Iterator[bytes]:
        """The ids, or the texts (decompressed UTF-8), of some rows in ascending order, read shard by shard."""
        decompressor = zstandard.ZstdDecompressor()
        for start, shard in zip(self.starts.tolist(), self.shards, strict=False):
            if not _any_between(rows, start, shard.info["documents"]):
                continue
            for number, (offset, ends) in enumerate(zip(shard.offsets(name), shard.each(f"{name}_end"), strict=True)):
                first = start + number * CHUNK
                low, high = np.searchsorted(rows, [first, first + len(ends)])
                for index in (rows[low:high] - first).tolist():
                    begin = int(ends[index - 1]) if index else 0
                    blob = shard.bytes_at(offset + begin, int(ends[index]) - begin)
                    try:
                        yield decompressor.decompress(blob) if name == "texts" else blob
                    except zstandard.ZstdError as error:
                        raise InputError(f"{shard.path}: damaged text ({error}); make the file again") from None


def _any_between(rows: NDArray[np.int64], start: int, count: int) -> bool:
    low, high = np.searchsorted(rows, [start, start + count])
    return bool(high > low)
