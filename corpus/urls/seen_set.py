"""A set of 64-bit hashes that finds first occurrences in a stream of any length, at 8 bytes per hash."""

import numpy as np
from numpy.typing import NDArray

_Hashes = NDArray[np.uint64]


class SeenSet:
    """The hashes so far, in sorted runs that double in size: O(n log n) time, 16 bytes per hash at the peak."""

    def __init__(self) -> None:
        self._runs: list[_Hashes] = []

    def add(self, hashes: _Hashes) -> NDArray[np.bool_]:
        """Add a batch; returns, for each hash, whether it is new: in no earlier batch and not earlier in this one."""
        unique, first_index = np.unique(hashes, return_index=True)
        new = np.ones(len(unique), dtype=np.bool_)
        for run in self._runs:
            index = np.searchsorted(run, unique)
            index[index == len(run)] = 0  # larger than every hash of the run: compare with any other one
            new &= run[index] != unique
        if new.any():
            self._runs.append(unique[new])
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            merged = np.concatenate([self._runs.pop(-2), self._runs.pop()])
            merged.sort(kind="stable")  # two sorted runs: one pass
            self._runs.append(merged)
        result = np.zeros(len(hashes), dtype=np.bool_)
        result[first_index[new]] = True
        return result
