"""Which 64-bit hashes came before: first occurrences in a stream of any length, 8 bytes a hash."""

import numpy as np
from numpy.typing import NDArray

_Hashes = NDArray[np.uint64]


class Seen:
    """The hashes met so far, in sorted runs that double in size: O(n log n) time, 16 bytes a hash at the peak."""

    def __init__(self) -> None:
        self._runs: list[_Hashes] = []

    def first(self, hashes: _Hashes) -> NDArray[np.bool_]:
        """For each hash of a batch, whether neither an earlier batch nor this one before it holds it."""
        unique, places = np.unique(hashes, return_index=True)
        new = np.ones(len(unique), dtype=np.bool_)
        for run in self._runs:
            at = np.searchsorted(run, unique)
            at[at == len(run)] = 0  # beyond the last one: compared with a smaller hash
            new &= run[at] != unique
        if new.any():
            self._runs.append(unique[new])
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            merged = np.concatenate([self._runs.pop(-2), self._runs.pop()])
            merged.sort(kind="stable")  # two sorted runs: one pass
            self._runs.append(merged)
        result = np.zeros(len(hashes), dtype=np.bool_)
        result[places[new]] = True
        return result
