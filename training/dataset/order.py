"""An epoch's order as a memory-mapped file, with an index of the documents and samples in it.

    order = read_order(path, key) or write_order(path, key, samples.make_epoch(0))
    order.samples_of(documents, seq_len)  # which samples hold these documents

`training.trace` keeps one for each epoch that it was asked about.
"""

# Little-endian, for D documents and S samples:
#
#   offset  type      content
#        0  9 bytes   URLORDER\0
#        9  16 bytes  key: what the order follows from
#       32  u64       D
#       40  u64       S
#       48  i64[D]    `ends` of the Epoch
#           i64[D]    `documents`, then for each document its index in them
#           i64[S]    `samples`, then for each sample its index in them

import struct
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.files import cache_path
from training.dataset.corpus import Epoch

_MAGIC = b"URLORDER\0"
_HEADER = struct.Struct("<9s16s7xQQ")


class Held(NamedTuple):
    """Samples that hold tokens of documents, one entry per document and sample."""

    document: npt.NDArray[np.int64]  # its number
    position: npt.NDArray[np.int64]  # the sample's index in the epoch's order
    tokens: npt.NDArray[np.int64]  # how many of the document's tokens the sample holds


def write_order(path: Path, key: str, epoch: Epoch) -> "Order":
    """Write the order of an epoch; `key` is 16 characters. Returns what `read_order` would."""
    with cache_path(path) as temporary, temporary.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, key.encode(), len(epoch.documents), len(epoch.samples)))
        epoch.ends.astype("<i8").tofile(file)
        for order in (epoch.documents, np.asarray(epoch.samples)):
            places = np.empty(len(order), "<i8")
            places[order] = np.arange(len(order))
            order.astype("<i8").tofile(file)
            places.tofile(file)
        file.close()
        written = read_order(temporary, key)  # another process may now replace `path` by the order of another key
        assert written is not None
    return written


def read_order(path: Path, key: str) -> "Order | None":
    """The order in a file; None if there is none of this key."""
    if not path.is_file() or path.stat().st_size < _HEADER.size:
        return None
    with path.open("rb") as file:
        view = mmap(file.fileno(), 0, access=ACCESS_READ)
    magic, written, documents, samples = _HEADER.unpack_from(view)
    if magic != _MAGIC or written != key.encode() or len(view) != _HEADER.size + 24 * documents + 16 * samples:
        return None
    return Order(view, documents, samples)


class Order:
    """An Epoch in a memory map, and its inverse."""

    def __init__(self, view: mmap, documents: int, samples: int) -> None:
        at = _HEADER.size + 8 * np.cumsum([0, documents, documents, documents, samples])
        ends, order, self._places = (np.frombuffer(view, "<i8", documents, begin) for begin in at[:3])
        cut, self._sample_places = (np.frombuffer(view, "<i8", samples, begin) for begin in at[3:])
        self.epoch = Epoch(order, ends, cut)

    def samples_of(self, documents: npt.NDArray[np.int64], seq_len: int, within: slice = slice(None)) -> Held:
        """The samples, each of seq_len + 1 tokens, that hold tokens of these training documents.

        `within`: only these tokens of a document.
        """
        places, ends = self._places[documents], self.epoch.ends
        end, begin = ends[places], np.where(places > 0, ends[places - 1], 0)
        if within.stop is not None:
            begin, end = begin + within.start, begin + within.stop
        first = np.maximum(0, (begin - 1) // seq_len)  # sample k holds k * seq_len to (k + 1) * seq_len, both included
        last = np.minimum((end - 1) // seq_len, len(self.epoch.samples) - 1)
        counts = np.where(end > begin, np.maximum(0, last - first + 1), 0)
        which = np.repeat(np.arange(len(documents)), counts)
        sample = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        tokens = np.minimum(end[which], (sample + 1) * seq_len + 1) - np.maximum(begin[which], sample * seq_len)
        return Held(documents[which], self._sample_places[sample], tokens)
