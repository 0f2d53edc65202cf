"""PREFIX.docs lists the document of each row of a dataset: id, URL, domain, origin, shard.

    rows = DocumentTable(prefix)
    rows[17].url, rows.of_url("https://example.com/page")

Row n describes document n of PREFIX.idx. Only provenance needs this file; other programs ignore it.
"""

# PREFIX.docs, little-endian, 24 bytes per document, then the texts:
#
#   offset  type        content
#        0  9 bytes     URLDOCS\0\0
#        9  u64         D, number of documents
#       17  u64         B, bytes of texts
#       25  u64[D]      id: the 16 hex digits of a document's `id` as a number
#           u64[D]      end of its text, counted from the beginning of the texts
#           u32[D]      first 4 bytes of sha256 of the registered domain of its URL; 0 without a URL
#           u32[D]      number of the file in `files` that it was read from; 0 if not known
#           B bytes     texts, UTF-8: URL, then a tab and the byte (of a WARC record) or line there
#           the rest    JSON: {"bin": checksum of PREFIX.bin, "files": [names, the first empty],
#                              "shards": [[name, documents], …]}

import hashlib
import os
import shutil
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property, lru_cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from common.errors import InputError
from common.files import Document, output_files, scratch_file
from corpus.index.dataset import IndexedDataset
from corpus.index.layout import DOCUMENTS, ENTRIES, RECORDS, arrays_at, json_of, read_meta, suffixed, with_checksums
from corpus.urls.hosts import registered_domain
from corpus.urls.url import document_id, parse_url

_MAGIC = b"URLDOCS\0\0"
_HEADER = struct.Struct("<9sQQ")
_COLUMNS = ("<u8", "<u8", "<u4", "<u4")
REMOVED = "0" * 16
"""The id of a document whose tokens are a tombstone: end-of-text, as often as it had tokens."""


class Row(NamedTuple):
    """One document of a dataset."""

    number: int
    """Its number in the dataset."""
    id: str
    """16 hex digits; REMOVED of a document that `workflow.provenance.remove` has removed."""
    url: str
    """Empty if it has none."""
    shard: str
    """Shard of the run that made it, "0003"."""
    origin: str
    """FILE:BYTE of a WARC record, FILE:LINE in another file; empty if neither is known."""


@lru_cache(1 << 16)
def _domain_of_host(host: str) -> int:
    return int.from_bytes(hashlib.sha256(registered_domain(host).encode()).digest()[:4])


def _host(url: str) -> str:
    """The ASCII host of a URL, or "" if it has none."""
    try:
        return parse_url(url).host
    except ValueError:
        return ""


class DocumentWriter:
    """Streams rows in constant memory, except for `files`; `finish` writes them into a file.

    `stack` closes the temporary files in `folder`.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.documents = self._end = 0
        self._files: dict[str, int] = {"": 0}
        self._shards: list[tuple[str, int]] = []
        self._parts = [stack.enter_context(scratch_file(folder)) for _ in range(len(_COLUMNS) + 1)]

    def add(self, documents: Sequence[Document], shard: str) -> None:
        """Append documents of a shard. An `id` of another form than ours counts as 0."""
        texts, hosts, files = [], [], []
        for document in documents:
            url = str(document.get("url") or "")
            file, _, place = str(document.get("origin") or "").rpartition(":")
            texts.append(f"{url}\t{place}".rstrip("\t").encode("utf-8", "surrogatepass"))
            host = _host(url)
            hosts.append(_domain_of_host(host) if host else 0)
            files.append(self._files.setdefault(file, len(self._files)))
        ends = self._end + np.cumsum([len(text) for text in texts], dtype=np.int64)
        ids = [_number(document.get("id")) for document in documents]
        self._write(
            [np.asarray(column, kind) for column, kind in zip((ids, ends, hosts, files), _COLUMNS, strict=True)]
        )
        self._parts[-1].write(b"".join(texts))
        self._count(shard, len(documents), int(ends[-1]) if len(ends) else self._end)

    def add_table(self, other: "DocumentTable", removed: Sequence[int] = ()) -> None:
        """Append all rows of another table, a few megabytes at a time; empty the `removed` ones."""
        numbers = np.array([self._files.setdefault(name, len(self._files)) for name in other.files], "<u4")
        tombstones, begin, end = np.array(removed, np.int64), 0, self._end
        for start in range(0, len(other), ENTRIES):
            ids, ends, domains, files = (np.array(column[start : start + ENTRIES]) for column in other.columns)
            lengths = np.diff(ends.astype(np.int64), prepend=begin)
            here = tombstones[(tombstones >= start) & (tombstones < start + len(ids))] - start
            for row in here.tolist():
                self._parts[-1].write(other.texts[begin : int(ends[row]) - lengths[row]])
                begin = int(ends[row])
            self._parts[-1].write(other.texts[begin : int(ends[-1])])
            begin, ids[here], domains[here], files[here], lengths[here] = int(ends[-1]), 0, 0, 0, 0
            ends = end + np.cumsum(lengths)
            self._write([ids, ends.astype("<u8"), domains, numbers[files]])
            end = int(ends[-1])
        for name, documents in other.shards:
            self._count(name, documents, end)

    def _write(self, columns: Sequence[npt.NDArray[Any]]) -> None:
        for part, column in zip(self._parts, columns, strict=False):
            part.write(np.ascontiguousarray(column).data)

    def _count(self, shard: str, documents: int, end: int) -> None:
        self.documents, self._end = self.documents + documents, end
        if self._shards and self._shards[-1][0] == shard:
            self._shards[-1] = (shard, self._shards[-1][1] + documents)
        else:
            self._shards.append((shard, documents))

    def finish(self, file: Any, checksum: str) -> None:
        """Write the whole table; `checksum` is that of the dataset's PREFIX.bin."""
        file.write(_HEADER.pack(_MAGIC, self.documents, self._end))
        for part in self._parts:
            part.seek(0)
            shutil.copyfileobj(part, file, 8 * ENTRIES)
        file.write(orjson.dumps({"bin": checksum, "files": list(self._files), "shards": self._shards}))


def write_tombstones(prefix: Path, numbers: Sequence[int]) -> None:
    """Replace documents of a dataset by tombstones and empty their rows; other tokens do not move.

    A kill in between leaves a dataset that fails its checks until this is done again.
    """
    index, table = IndexedDataset(prefix), DocumentTable(prefix, check=False)
    assert index.meta is not None
    digest = xxhash.xxh3_64()
    with suffixed(prefix, ".bin").open("r+b") as file:
        for number in numbers:
            first, last = index.document_index[number : number + 2].tolist()
            file.seek(int(index.pointers[first]))
            file.write(np.full(int(index.lengths[first:last].sum()), index.meta.end_of_text, index.dtype).data)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        while part := file.read(8 * ENTRIES):
            digest.update(part)
    paths = [suffixed(prefix, ".json"), table.path]
    with output_files(paths) as (meta, rows), ExitStack() as stack, rows.open() as file:
        writer = DocumentWriter(prefix.parent, stack)
        writer.add_table(table, numbers)
        writer.finish(file, digest.hexdigest())
        meta.append(json_of(with_checksums(suffixed(prefix, ".idx"), index.meta, digest.hexdigest())))


def _number(name: object) -> int:
    try:
        return int(str(name), 16) & (2**64 - 1)
    except ValueError:
        return 0


class DocumentTable:
    """Reads PREFIX.docs through a memory map, so that opening takes constant time.

    columns     ids u64 (D,), ends u64 (D,), domains u32 (D,), files u32 (D,)
    texts       bytes of all texts, a view into the file
    files       names of the files that documents were read from; the first is empty
    shards      (name, documents) in order

    Raises InputError if the file is missing, damaged, or, if `check`, belongs to another dataset.
    """

    def __init__(self, prefix: Path, check: bool = True) -> None:
        self.path = path = suffixed(prefix, DOCUMENTS)
        if not path.is_file():
            raise InputError(f"{path}: no such file: a dataset of another tool, or older; tokenize its documents again")
        try:
            with path.open("rb") as file:
                data = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))
            magic, documents, size = _HEADER.unpack_from(data)
            self.columns = arrays_at(data, _HEADER.size, *((kind, documents) for kind in _COLUMNS))
            self.ids, self.ends, self.domains, self._files = self.columns
            begin = _HEADER.size + sum(column.nbytes for column in self.columns)
            self.texts = data[begin : begin + size]
            more = orjson.loads(data[begin + size :])
            self.files: list[str] = more["files"]
            self.shards: list[tuple[str, int]] = [(name, count) for name, count in more["shards"]]
            whole = magic == _MAGIC and size == (self.ends[-1] if documents else 0)
        except (ValueError, LookupError, TypeError, OverflowError, struct.error):  # mmap: an empty file
            whole = False
        if not whole:
            raise InputError(f"{path}: damaged; remove it and make it again")
        meta = read_meta(prefix) if check else None
        if meta is not None and meta.bin not in ("", more["bin"]):
            raise InputError(f"{path}: belongs to another dataset than {prefix.name}.bin; remove it and make it again")

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def _shard_ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum([documents for _, documents in self.shards], dtype=np.int64)

    def __getitem__(self, number: int) -> Row:
        begin = int(self.ends[number - 1]) if number else 0
        text = bytes(self.texts[begin : int(self.ends[number])]).decode("utf-8", "surrogatepass")
        url, _, place = text.partition("\t")
        file = self.files[self._files[number]]
        shard = self.shards[int(np.searchsorted(self._shard_ends, number, side="right"))][0]
        name = int(self.ids[number])
        origin = f"{file}:{place}" if file else self._in_crawl(shard, name)
        return Row(number, f"{name:016x}", url, shard, origin)

    @lru_cache(1 << 10)  # noqa: B019 - as many as a run has shards
    def _records(self, archive: Path) -> "npt.NDArray[np.uint64] | None":
        path = archive.with_name(archive.name + RECORDS)
        return np.memmap(path, "<u8", "r").reshape(2, -1) if path.is_file() and path.stat().st_size else None

    def _in_crawl(self, shard: str, name: int) -> str:
        """FILE:BYTE of a page in the archive of the dataset's own run."""
        archive = self.path.parent.parent / f"pages/{shard}.warc.gz"
        if (records := self._records(archive)) is None:
            return ""
        place = int(np.searchsorted(records[0], np.uint64(name)))
        listed = place < len(records[0]) and int(records[0, place]) == name
        return f"{archive}:{records[1, place]}" if listed else ""

    def domain(self, number: int) -> str:
        """The registered domain of a document's URL; "" without one."""
        return registered_domain(_host(self[number].url))

    def of_ids(self, ids: Iterable[str]) -> list[int]:
        """The numbers of the documents with these ids, ascending."""
        wanted = np.unique(np.array([_number(name) for name in ids], np.uint64))
        return _where(self.ids, wanted)

    def of_url(self, url: str) -> list[int]:
        """The numbers of the documents of a URL in any spelling, else InputError."""
        try:
            return self.of_ids([document_id(url)])
        except ValueError as error:
            raise InputError(f"{url}: not a URL ({error})") from None

    def of_domain(self, domain: str) -> list[int]:
        """The numbers of the documents whose host is `domain` or lies below it."""
        host = _host(f"http://{domain}/")
        if not host:
            raise InputError(f"{domain}: not the name of a host")
        numbers = _where(self.domains, np.array([_domain_of_host(host)], np.uint32))
        return [number for number in numbers if f".{_host(self[number].url)}".endswith(f".{host}")]


def _where(column: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> list[int]:
    """The positions of some values, in constant memory."""
    positions: list[int] = []
    for start in range(0, len(column), ENTRIES):
        part = column[start : start + ENTRIES]
        hits = part == wanted[0] if len(wanted) == 1 else np.isin(part, wanted)
        positions.extend((np.flatnonzero(hits) + start).tolist())
    return positions
