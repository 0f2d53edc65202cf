"""Phase 1, one job per shard: hashes of each document, and the position of its text.

Segments, one row per document, 262,144 rows at a time, beside the columns of hashes
(corpus/dedup/columns.py):

| name | dtype | content |
|---|---|---|
| key | u64 | orders documents independently of shards, the longest first: see `key_of` |
| exact | u64 | hash of the normalised text |
| size | i64 | characters |
| lines | i64 (documents, 2) | position and length of the line in the decompressed shard |
| ids, ids_end | bytes, i64 | ids, and the end of each |
| frames | i64 (frames, 2) | once: where each compressed frame of the shard and its text begin |

The shard is found by its path relative to this file, so a run can be moved.
"""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from common.config import read_yaml
from common.errors import InputError
from common.files import (
    REMOVED_IDS,
    BadLines,
    Document,
    Frames,
    digest,
    lines_at,
    located_documents,
    removed_ids,
    shard_paths,
    short_hash,
)
from common.progress import Meter
from common.settings import DedupSettings
from common.workers import Workers, batched
from corpus.dedup.columns import bounds, read_column, write_columns
from corpus.dedup.shingles import RULE, MinHasher, band_hashes, normalised
from corpus.segments import Segments, write_segments

_BATCH = 64  # documents sent to a worker at once
CHUNK = 1 << 18  # documents in a segment: 300 MB while it is written
REMOVALS = "all.removed"
"""File beside the signatures with the removed documents: see corpus/dedup/clusters.py."""


def fingerprint(settings: DedupSettings) -> dict[str, Any]:
    """The rule and settings of shingles and signatures, which the files of all phases share."""
    keys = {"shingle_characters", "shingle_words", "bands", "rows", "seed"}
    return {"rule": RULE, **settings.model_dump(include=keys, mode="json")}


@lru_cache(1)
def _hasher(settings: str) -> MinHasher:
    return MinHasher(DedupSettings.model_validate_json(settings))


def key_of(name: str, text: str) -> int:
    """A document's key: 20 bits of its length, the longest first, 44 of a hash of its id and text.

    Lengths from 32,768 characters on are rounded to 15 bits.
    """
    extra = max(0, len(text).bit_length() - 15)
    length = (extra << 15) + (len(text) >> extra)
    return (((1 << 20) - 1 - length) << 44) | (xxhash.xxh3_64_intdigest(name.encode() + b"\0" + text.encode()) >> 20)


def hash_of(name: str) -> int:
    """The hash of an id."""
    return xxhash.xxh3_64_intdigest(name.encode())


def describe(settings: DedupSettings, located: Sequence[tuple[int, int, Document]]) -> dict[str, Any]:
    """The columns of some documents, each given after the position and length of its line.

    `ids` is a list of bytes, `hashes` has shape (N, 1 + bands), `lines` (N, 2).
    """
    hasher, documents = _hasher(settings.model_dump_json()), [document for _, _, document in located]
    signatures = np.empty((len(documents), settings.bands * settings.rows), dtype=np.uint32)
    exact = np.empty(len(documents), dtype=np.uint64)
    for row, document in enumerate(documents):
        text = normalised(document["text"])
        signatures[row], exact[row] = hasher.signature(text), xxhash.xxh3_64_intdigest(text.encode())
    return {
        "ids": [document["id"].encode() for document in documents],
        "key": np.array([key_of(document["id"], document["text"]) for document in documents], dtype=np.uint64),
        "exact": exact,
        "size": np.array([len(document["text"]) for document in documents], dtype=np.int64),
        "lines": np.array([line for *line, _ in located], dtype=np.int64),
        "hashes": np.column_stack([exact, band_hashes(signatures, settings)]),
    }


def place_of(shard: Path, signatures: Path) -> str:
    """The path of a shard, relative to its signatures."""
    return os.path.relpath(shard.resolve(), signatures.parent.resolve())


def write_signatures(
    shard: Path, output: Path, settings: DedupSettings, pool: Workers, max_bad_share: float = 0.001, identity: int = 0
) -> int:
    """Write the signatures of a shard; returns the number of documents.

    `identity` is that of the signatures that they replace, if any. Raises InputError for unreadable
    input.
    """
    bad, frames = BadLines(max_bad_share), Frames()
    info: dict[str, Any] = {
        "settings": fingerprint(settings),
        "source": digest(shard),
        "shard": place_of(shard, output),
    }
    info |= {"documents": 0, "bad_lines": 0} | ({"identity": identity} if identity else {})
    documents = batched(located_documents(shard, bad, frames), _BATCH)
    with write_segments(output, info) as file, Meter("dedup signatures", "documents") as meter:
        for parts in batched(pool.map(partial(describe, settings), documents), CHUNK // _BATCH):
            columns = {
                name: np.concatenate([part[name] for part in parts])
                for name in ("key", "exact", "size", "lines", "hashes")
            }
            write_columns(file, columns.pop("hashes"), columns["exact"], columns["key"])
            for name, values in columns.items():
                file.append(name, values.reshape(-1))
            ids = [name for part in parts for name in part["ids"]]
            file.append("ids", np.frombuffer(b"".join(ids), dtype=np.uint8))
            file.append("ids_end", np.cumsum([len(name) for name in ids], dtype=np.int64))
            info["documents"] += len(ids)
            meter.advance(len(ids))
        file.append("frames", np.array(frames, dtype=np.int64).reshape(-1))
        bad.check()
        info["bad_lines"] = bad.bad
    return int(info["documents"])


def earlier_signatures(folders: Sequence[Path]) -> list[Path]:
    """The signatures of earlier runs, given runs or folders of signatures.

    Raises InputError if one has none.
    """
    earlier = list[Path]()
    for folder in folders:
        inside = folder / "dedup/work" if (folder / "dedup").is_dir() else folder
        paths = sorted(inside.glob("*.signatures"))
        if (folder / "config.yaml").is_file():  # files of another number of shards may lie there, too
            paths = shard_paths(inside, int(read_yaml(folder / "config.yaml")["shards"]), ".signatures")
        if not paths or not all(map(Path.exists, paths)):
            raise InputError(
                f"{folder}: dedup.against names it, but its signatures are not in {inside}; "
                f"run `python -m corpus.dedup signatures --input SHARD --work {inside}` for each of its clean shards"
            )
        earlier += paths
    return list(dict.fromkeys(earlier))


def identity_of(path: Path) -> int:
    """The first checksum of a file of signatures, which `workflow.provenance.remove` keeps."""
    file = Segments(path)
    return int(file.info.get("identity") or file.checksum)


def content_of(folders: Sequence[Path]) -> str:
    """A hash of the documents of earlier runs, or "". Takedowns keep it, so no run is repeated."""
    paths = earlier_signatures(folders)
    removals = dict.fromkeys(path.with_name(REMOVALS) for path in paths)
    paths += [path for path in removals if path.exists()]
    return short_hash(repr([identity_of(path) for path in paths])) if folders else ""


class Removals:
    """The documents that dedup removed from an earlier run, so that they displace nothing.

    Those whose kept document was taken down (`workflow.provenance.remove`) displace others in its
    place.
    """

    def __init__(self, work: Path) -> None:
        path = work / REMOVALS
        self._tables, self.checksum = list[tuple[NDArray[np.uint64], NDArray[np.uint64]]](), 0
        taken_down = removed_ids([work.parent.parent / REMOVED_IDS])
        self._taken_down = np.array([hash_of(name) for name in taken_down], dtype=np.uint64)
        if path.exists():
            with Segments(path) as file:
                for _ in chain(file.each("key"), file.each("kept")):  # verifies them
                    pass
                self._tables = list(zip(file.mapped("key"), file.mapped("kept"), strict=True))
                self.checksum = file.checksum

    def has(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Whether each of some documents was removed, by their keys."""
        removed = np.zeros(len(keys), dtype=np.bool_)
        for key, kept in self._tables:
            place = np.minimum(np.searchsorted(key, keys), len(key) - 1)
            removed |= (key[place] == keys) & ~np.isin(kept[place], self._taken_down)
        return removed


class Signatures:
    """The signatures of all shards, those of `dedup.against` first, then ours in order of name.

    A document's row is its index in all shards.
    """

    def __init__(self, paths: Sequence[Path], settings: DedupSettings) -> None:
        earlier = [Segments(path) for path in earlier_signatures(settings.against)]
        for path in paths:
            if any(path.samefile(other.path) for other in earlier if other.path.name == path.name):
                raise InputError(f"{path}: dedup.against names this run itself; name earlier ones")
        self.own = [Segments(path) for path in sorted(paths, key=lambda path: path.name)]
        self.shards = [*earlier, *self.own]
        for shard in self.shards:
            _check_settings(shard, settings)
        counts = [shard.info["documents"] for shard in self.shards]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        """First row of each shard, then the number of documents: shape (shards + 1,)."""
        self.earlier = int(self.starts[len(earlier)])
        """The documents of `dedup.against`: the rows below this one."""
        self.count = int(self.starts[-1])
        self._removals = {work: Removals(work) for work in dict.fromkeys(shard.path.parent for shard in earlier)}
        names = [(shard.path.name, shard.checksum) for shard in self.shards]
        names += [(REMOVALS, removals.checksum) for removals in self._removals.values() if removals.checksum]
        self.digest = short_hash(repr(names))
        """Identifies the content of all shards, which the rows in pairs and edges refer to."""

    def check(self, file: Segments) -> None:
        """Raise InputError for a file of a later phase that was made from other signatures."""
        if file.info.get("signatures") != self.digest:
            raise InputError(f"{file.path}: made from other signatures; delete it and run its phase again")

    def chunks(self, low: int = 0) -> Iterator[tuple[int, int, Segments, int]]:
        """(first row, documents, open shard, number in it) of the chunks from row `low` on."""
        for start, shard in zip(self.starts.tolist(), self.shards, strict=False):
            if start >= low and shard.info["documents"]:
                with shard:
                    for first in range(0, shard.info["documents"], CHUNK):
                        yield start + first, min(CHUNK, shard.info["documents"] - first), shard, first // CHUNK

    def part(self, column: int, part: int, parts: int) -> list[NDArray[Any]]:
        """Rows, hashes, exact hashes and keys of the hashes in part `part` of `parts`.

        Of earlier documents, only those that their runs kept and whose hash a later one has, too.
        """
        limits, wanted = bounds(part, parts), None
        columns: list[list[NDArray[Any]]] = [[np.empty(0, dtype=dtype)] for dtype in ("<i8", "<u8", "<u8", "<u8")]
        for low, high in ((self.earlier, self.count), (0, self.earlier)):
            for first, count, shard, number in self.chunks(low):
                if first >= high:
                    break
                hashes, rows = read_column(shard, number, count, column, limits, wanted)
                if wanted is not None:
                    kept = ~self._removals[shard.path.parent].has(rows["key"])
                    hashes, rows = hashes[kept], rows[kept]
                arrays = first + rows["row"].astype(np.int64), hashes, rows["exact"], rows["key"]
                for column_parts, array in zip(columns, arrays, strict=True):
                    column_parts.append(array)
            wanted = np.unique(np.concatenate(columns[1]))
        return [np.concatenate(column_parts) for column_parts in columns]

    def _open(self, rows: NDArray[np.int64]) -> Iterator[tuple[Segments, NDArray[np.int64]]]:
        """Each shard of some rows in ascending order, open, and the rows inside it."""
        for start, shard in zip(self.starts.tolist(), self.shards, strict=False):
            low, high = np.searchsorted(rows, [start, start + shard.info["documents"]])
            if high > low:
                with shard:
                    yield shard, rows[low:high] - start

    def lines(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Position and length of the lines of some rows in ascending order: shape (rows, 2)."""
        lines = [_pick(shard, local, "lines", 2) for shard, local in self._open(rows)]
        return np.concatenate([np.empty((0, 2), dtype=np.int64), *lines])

    def documents(self, rows: NDArray[np.int64]) -> Iterator[Document]:
        """The documents of some rows in ascending order.

        Raises InputError for a shard that has changed.
        """
        for shard, local in self._open(rows):
            path = shard.path.parent / shard.info["shard"]
            frames = [(begin, text) for part in shard.each("frames") for begin, text in part.reshape(-1, 2).tolist()]
            keys, lines = _pick(shard, local, "key", 1)[:, 0].tolist(), _pick(shard, local, "lines", 2).tolist()
            try:
                for key, line in zip(keys, lines_at(path, frames, map(tuple, lines)), strict=True):
                    document = orjson.loads(line)
                    if key_of(document["id"], document["text"]) != key:
                        raise ValueError
                    yield document
            except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
                raise InputError(f"{path}: changed since {shard.path} was made; make the signatures again") from None


def _check_settings(shard: Segments, settings: DedupSettings) -> None:
    theirs, ours = shard.info.get("settings") or {}, fingerprint(settings)
    if theirs.get("rule") != RULE:
        place = os.path.normpath(shard.path.parent / shard.info["shard"])
        raise InputError(
            f"{shard.path}: made by another version of this toolkit, which compared texts in another form; make it "
            f"again: python -m corpus.dedup signatures --input {place} --work {shard.path.parent}"
        )
    different = [f"{key} {theirs.get(key)}, here {value}" for key, value in ours.items() if theirs.get(key) != value]
    if different:
        raise InputError(
            f"{shard.path}: made with other settings of dedup ({'; '.join(different)}); "
            "run the phase `signatures` again"
        )


def _pick(shard: Segments, rows: NDArray[np.int64], name: str, width: int) -> NDArray[Any]:
    """Some rows, ascending, of an array with `width` values per document: shape (rows, width)."""
    picked = []
    for chunk in np.unique(rows // CHUNK).tolist():
        values = shard.array(name, chunk).reshape(-1, width)
        picked.append(values[rows[rows // CHUNK == chunk] - chunk * CHUNK])
    return np.concatenate(picked)
