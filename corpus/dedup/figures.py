"""The figures of phase 4: clusters by size, similarities, some near duplicates and their survivors.

A cluster is a kept document with those that were removed because they resemble it.
"""

from collections import Counter
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import numpy as np

from corpus.dedup.pairs import Rows
from corpus.dedup.signatures import Signatures
from corpus.dedup.survivors import Choice, Members

_NEAR, _BEFORE, _SHOWN = 10, 100, 600  # near duplicates; characters before they differ, and in all
_NAMED = 3  # ids of the largest cluster
_BINS = 20  # of similarities from 0 to 1


class Figures:
    """Counts the clusters of all parts; neither parts nor shards change a figure."""

    def __init__(self, signatures: Signatures) -> None:
        self._signatures = signatures
        self._alone = signatures.count - signatures.earlier
        self._sizes, self._similarities = Counter[int](), Counter[int]()
        self._compared = self._incomplete = 0
        # size, key of the survivor, description
        self._largest: tuple[int, int, dict[str, Any]] = (0, 0, {})
        # hash, key, row, row of the survivor, similarity
        self._near: list[tuple[int, int, int, int, float]] = []

    def add(self, members: Members, ids: Sequence[bytes], removed: Rows, choice: Choice) -> None:
        """Count the clusters of a part; `removed` are the indices of its removed documents."""
        self._compared += choice.compared
        self._incomplete += choice.incomplete
        if not len(removed):
            return
        survivor, similarity = choice.survivor[removed], choice.similarity[removed]
        kept, cluster, count = np.unique(survivor, return_inverse=True, return_counts=True)
        self._alone -= len(removed) + int((members["row"][kept] >= self._signatures.earlier).sum())
        self._sizes.update((count + 1).tolist())
        near = np.flatnonzero(members["exact"][removed] != members["exact"][survivor])
        self._similarities.update((similarity[near] * _BINS).astype(np.int64).tolist())
        some = near[np.lexsort((members["key"][removed[near]], members["exact"][removed[near]]))[:_NEAR]]
        chosen, best = members[removed[some]], members["row"][survivor[some]]
        columns = chosen["exact"], chosen["key"], chosen["row"], best, similarity[some]
        self._near += zip(*(column.tolist() for column in columns), strict=True)
        self._near = sorted(self._near)[:_NEAR]
        first = int(np.lexsort((members["key"][kept], -count))[0])
        size, key = int(count[first]) + 1, int(members["key"][kept[first]])
        if (size, -key) > (self._largest[0], -self._largest[1]):
            others = sorted(ids[index].decode() for index in removed[cluster == first].tolist())
            lowest = round(float(similarity[cluster == first].min()), 4)
            names = [ids[kept[first]].decode(), *others][:_NAMED]
            self._largest = size, key, {"documents": size, "lowest_similarity": lowest, "ids": names}

    def described(self) -> dict[str, Any]:
        """The figures as they are in the statistics."""
        sizes = {1: self._alone} | self._sizes
        figures: dict[str, Any] = {
            "cluster_sizes": {str(size): sizes[size] for size in sorted(sizes) if sizes[size]},
            "near_similarities": {f"{bin / _BINS:.2f}": count for bin, count in sorted(self._similarities.items())},
            "compared": self._compared,
            "not_compared_with_all": self._incomplete,
            "near": self._described_near(),
        }
        return figures | ({"largest_cluster": self._largest[2]} if self._largest[2] else {})

    def _described_near(self) -> list[Any]:
        """Pairs of a near duplicate and its survivor; texts start shortly before they differ."""
        wanted = np.unique(np.array([pair[2:4] for pair in self._near], dtype=np.int64))
        documents, pairs = dict(zip(wanted.tolist(), self._signatures.documents(wanted), strict=True)), []
        for *_, row, survivor, similarity in self._near:
            pair = documents[row], documents[survivor]
            same = commonprefix([document["text"] for document in pair])  # noqa: RUF071 - of characters, not of paths
            start = max(0, len(same) - _BEFORE)
            removed, kept = (
                {"id": document["id"], "url": document.get("url"), "text": document["text"][start : start + _SHOWN]}
                for document in pair
            )
            pairs.append([{**removed, "similarity": round(similarity, 4)}, kept])
        return pairs
