"""The normalised form of a text, its shingles, their MinHash, and the Jaccard similarity of sets.

    normalised("Soft\u00adly\n  SAID")   # "softly said"

Exact duplicates are equal in this form, and shingles are taken from it. A shingle is
`shingle_characters` successive characters (or `shingle_words` words of corpus/text/words.py),
identified by a multilinear hash (Lemire and Kaser, 2014) mod 2**64: two different shingles of five
characters collide with probability below 2**-43.
"""

import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NewType

import numpy as np
import xxhash
from numpy.typing import NDArray

from common.settings import DedupSettings
from corpus.text.words import fold, words

RULE = 2
"""Version of the normalised form and of shingles. Only signatures of one version are compared."""

Normalised = NewType("Normalised", str)
"""A text in the form in which documents are compared."""

Shingles = NDArray[np.uint64]
"""The distinct shingles of a text in ascending order."""

# 2**64 / golden ratio, odd: multiplicative hashing (Knuth, TAOCP 3, 6.4)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_PIECE = 1 << 16  # characters
_BLOCK = 4096  # shingles permuted at a time: 120 x 4096 x 4 bytes fit in the L2 cache of a core


@lru_cache(8)
def _keys(count: int) -> NDArray[np.uint64]:
    """Odd random multipliers."""
    return np.random.RandomState(2014).randint(0, 1 << 63, count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def normalised(text: str) -> Normalised:
    """NFKC_Casefold, which removes invisible characters; then white space as single spaces."""
    return Normalised(" ".join(fold(text).split()))


def codes(text: str, settings: DedupSettings) -> NDArray[np.uint64]:
    """The shingle at every position of a text; a text shorter than a shingle is padded to one."""
    if settings.shingle_words:
        length = settings.shingle_words
        hashes = [xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass")) for word in words(text) or [text]]
        values = np.array(hashes, dtype=np.uint64)
    else:
        length = settings.shingle_characters
        values = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)
    if len(values) < length:
        padding = sys.maxunicode + 1  # not a character
        values = np.pad(values, (0, length - len(values)), constant_values=padding)
    count = len(values) - length + 1
    code = np.full(count, length, dtype=np.uint64)
    for offset, key in enumerate(_keys(length)):
        code += values[offset : offset + count] * key
    return code


def _code_blocks(text: Normalised, settings: DedupSettings) -> Iterator[NDArray[np.uint64]]:
    """`codes` in pieces, so that a text of 50 MB takes a megabyte; whole for shingles of words."""
    overlap = settings.shingle_characters - 1
    step = len(text) + 1 if settings.shingle_words else _PIECE
    for start in range(0, max(1, len(text) - overlap), step):
        yield codes(text[start : start + step + overlap], settings)


def shingles(text: Normalised, settings: DedupSettings) -> Shingles:
    """The set of a text's shingles."""
    code = np.sort(codes(text, settings))
    new = np.ones(len(code), dtype=np.bool_)
    np.not_equal(code[1:], code[:-1], out=new[1:])
    return code[new]


def jaccard(first: Shingles, second: Shingles) -> float:
    """Intersection over union of two sets, each in ascending order."""
    both = np.concatenate([first, second])
    both.sort(kind="stable")  # merges two sorted runs
    common = int(np.count_nonzero(both[1:] == both[:-1]))
    return common / (len(both) - common)


def parities(of: Shingles, bits: int) -> NDArray[np.uint64]:
    """A bitmap of `bits`, a power of two: 1 where an odd number of shingles fall; (bits / 64,)."""
    slots = (of * _MIX) >> np.uint64(65 - bits.bit_length())
    odd = np.bincount(slots.astype(np.int64), minlength=bits) & 1
    return np.packbits(odd.astype(np.bool_)).view(np.uint64)


def shingle_hash(code: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The 32-bit hashes of shingles, which MinHash permutes."""
    return ((code * _MIX) >> np.uint64(32)).astype(np.uint32)


def _finalizer(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """MurmurHash3's 32-bit finalizer, with which datasketch mixes before it permutes."""
    values = values ^ (values >> np.uint32(16))
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    values ^= values >> np.uint32(16)
    return values


class MinHasher:
    """MinHash signatures over `shingle_hash`: those of datasketch's MinHash, scheme "affine32"."""

    def __init__(self, settings: DedupSettings) -> None:
        from datasketch import MinHash

        permutations: Any = MinHash(settings.bands * settings.rows, seed=settings.seed, scheme="affine32").permutations
        self._settings = settings
        self._a, self._b = (values[:, None] for values in permutations)
        self._buffer = np.empty((len(self._a), _BLOCK), dtype=np.uint32)

    def signature(self, text: Normalised) -> NDArray[np.uint32]:
        """The least a * h + b mod 2**32 of a text's shingles per permutation, (bands * rows,)."""
        least = np.full(len(self._a), 0xFFFFFFFF, dtype=np.uint32)
        for code in _code_blocks(text, self._settings):
            hashes = _finalizer(shingle_hash(code))
            for start in range(0, len(hashes), _BLOCK):
                block = hashes[None, start : start + _BLOCK]
                values = np.multiply(self._a, block, out=self._buffer[:, : block.shape[1]])
                values += self._b
                np.minimum(least, values.min(axis=1), out=least)
        return least


def band_hashes(signatures: NDArray[np.uint32], settings: DedupSettings) -> NDArray[np.uint64]:
    """One 64-bit hash per band: (N, bands * rows) -> (N, bands). Equal values give equal hashes."""
    values = signatures.reshape(-1, settings.bands, settings.rows).astype(np.uint64)  # (N, bands, rows)
    hashes = (values * _keys(settings.rows)).sum(axis=2, dtype=np.uint64)
    hashes ^= hashes >> np.uint64(32)  # the high bits choose a part: let them depend on every value
    hashes *= _MIX
    return np.asarray(hashes, dtype=np.uint64)
