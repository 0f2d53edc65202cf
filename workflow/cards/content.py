"""The training content of a model: tokens by domain, or by file for documents of files.

    content = read_content(Trace(folder), percent=10)
    content.domains    # (domain, tokens) of the tenth of the domains with the most tokens

A token counts each time that it was a target. A sample of seq_len + 1 tokens has seq_len targets:
all but its first, so that the token at the border of two samples counts once. Their sum is the
`consumed_tokens` of train.csv.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.files import read_shards
from common.stats import Stats
from corpus.index import IndexedDataset, suffixed
from corpus.index.documents import DocumentTable
from corpus.index.layout import DOCUMENTS
from training.trace import Trace


class Content(NamedTuple):
    """Tokens that a model was trained on, each as often as it was read, by where they come from."""

    tokens: int
    """All of them but those of removed documents."""
    domains: list[tuple[str, int]]
    """(registered domain, tokens of documents with such a URL), the most first."""
    domain_count: int
    """All domains; identified by 4 bytes, so that in a million some hundred collide."""
    files: list[tuple[str, int]]
    """(file, tokens of documents that were read from it), archives included, the most first."""
    crawled: int
    """Tokens of crawled pages, by the run or its base; the rest has neither URL nor file."""


def targets_read(trace: Trace, corpus: int, documents: int) -> npt.NDArray[np.int64]:
    """How many targets of each document of a dataset were read, (documents,).

    Takes O(documents + samples) per epoch.
    """
    taken, size = trace.blend.taken(trace.consumed, corpus), trace.seq_len
    targets = np.zeros(documents, np.int64)
    samples = len(trace.order(corpus, 0).epoch.samples)
    for number in range(-(-taken // samples)):
        epoch = trace.order(corpus, number).epoch
        read = np.zeros(samples + 1, np.int64)  # targets read of each sample; the last stands for the rest of the epoch
        read[epoch.samples[: taken - number * samples]] = size
        before = np.cumsum(read) - read
        # a document that ends at token n of the epoch ends at target n - 1
        sample, rest = np.divmod(np.clip(epoch.ends - 1, 0, samples * size), size)
        targets[epoch.documents] += np.diff(before[sample] + np.minimum(read[sample], rest), prepend=0)
    return targets


def read_content(trace: Trace, percent: int = 10, most: int = 10**9) -> Content:
    """Count what a model was trained on; list `percent` of its domains, at most `most`."""
    domains, files = Counter[int](), Counter[str]()
    crawled = removed = 0
    named: dict[int, tuple[DocumentTable, int]] = {}
    for corpus, prefix in enumerate(trace.prefixes):
        if not suffixed(prefix, DOCUMENTS).is_file():
            continue
        table = DocumentTable(prefix)
        tokens, origins = targets_read(trace, corpus, len(table)), table.columns[3]
        keys, first, group = np.unique(table.domains, return_index=True, return_inverse=True)
        sums = np.bincount(group, tokens).astype(np.int64)  # exact below 2^53
        for key, number, count in zip(keys.tolist(), first.tolist(), sums.tolist(), strict=True):
            if key and count:
                domains[key] += count
                named.setdefault(key, (table, number))
        for number, count in enumerate(np.bincount(origins, tokens)[1:].tolist(), 1):
            files[table.files[number]] += int(count)
        crawled += int(tokens[(origins == 0) & (table.domains != 0)].sum())
        removed += int(tokens[table.ids == 0].sum())  # tombstones, which no loss counts
    ranked = sorted(domains.items(), key=lambda item: (-item[1], item[0]))
    shown = ranked[: min(-(-percent * len(ranked) // 100), most)]
    names = [(named[key][0].domain(named[key][1]), tokens) for key, tokens in shown]
    by_file = sorted(((name, count) for name, count in files.items() if count), key=lambda item: (-item[1], item[0]))
    return Content(trace.consumed * trace.seq_len - removed, names, len(ranked), by_file, crawled)


def recount(shards: Iterable[Path]) -> Stats:
    """Statistics of the current documents of shards."""
    stats = Stats("cards")
    for document in read_shards(shards):
        stats.keep(document)
    return stats


def without_tombstones(prefix: Path) -> tuple[int, int]:
    """The documents of a run's dataset and their tokens, without removed ones."""
    left = DocumentTable(prefix).ids != 0
    return int(left.sum()), int(IndexedDataset(prefix).lengths[left].sum())  # a sequence per document
