"""Which documents an iteration of a training read, and which iterations read a document.

    trace = Trace(Path("results/demo/models/tiny"))
    trace.step(12)                       # what iteration 12 read
    trace.reads(0, [7]).iterations       # which iterations read document 7 of the first dataset

A sample is seq_len + 1 tokens of the training part: the token at a border is in two. An epoch's
order is cached in MODEL/trace: 24 bytes per document, 16 per sample.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.config import load_settings
from common.errors import InputError
from common.files import read_json, read_rows, short_hash
from common.tokenizer import Tokenizer
from common.vocabulary import vocabulary_files
from corpus.index import suffixed
from corpus.index.documents import DocumentTable, Row
from training.dataset.blend import Blend
from training.dataset.corpus import Corpus, Samples, Span, split_documents
from training.dataset.order import Order, read_order, write_order
from training.model_folder import checkpoint_folders, iteration_of, newest_iteration


@dataclass(frozen=True)
class Piece:
    """Tokens of one document in one sample of a step."""

    sample: int  # its number in the global batch
    dataset: Path
    document: Row
    span: Span


class Reads(NamedTuple):
    """Readings of documents of one dataset, in training order: one per document and sample."""

    documents: npt.NDArray[np.int64]
    iterations: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]


class Trace:
    """The data that a model was trained on, step by step; `data` names datasets that have moved.

    Raises InputError if the folder is not a model's, or its data are gone or were made again.
    """

    def __init__(self, folder: Path, data: Sequence[Path] = ()) -> None:
        path = folder / "settings.yaml"
        if not path.is_file():
            raise InputError(f"{path}: no such file; name the folder of a model that has been trained")
        self.folder, self.settings = folder, load_settings(path)
        self.train = self.settings.experiment(folder.name).train
        self.seq_len = self.settings.experiment(folder.name).model.seq_len
        datasets = self.settings.datasets(folder.name)
        if data and len(data) != len(datasets):
            raise InputError(f"--data names {len(data)} datasets; {path} has {len(datasets)}")
        self.prefixes = list(data) or [self._found(source.prefix) for source in datasets]
        self.blend = Blend((), [source.weight for source in datasets])  # only the order: no dataset is opened
        starts = {int(row["iteration"]): int(row["consumed_samples"]) for row in read_rows(folder / "starts.csv")}
        starts = dict(sorted(({0: 0} | starts).items()))
        self._iterations, self._consumed = list(starts), list(starts.values())
        logged = max((int(row["iteration"]) for row in read_rows(folder / "train.csv")), default=0)
        self.trained = max(logged, newest_iteration(folder))
        self.consumed = self.consumed_after(self.trained)
        self._orders: dict[tuple[int, int], Order] = {}

    def _found(self, prefix: Path) -> Path:
        """The path of a dataset; in the model's own run it is relative to RUN, which may move."""
        run = self.settings.run
        if self.folder.parent.name == "models" and prefix.is_relative_to(run):
            return self.folder.parent.parent / prefix.relative_to(run)
        return prefix

    def _batch(self, interval: int) -> int:
        """Samples per iteration after a start of the run."""
        if interval + 1 == len(self._iterations):
            return self.train.global_batch_size
        samples = self._consumed[interval + 1] - self._consumed[interval]
        return samples // (self._iterations[interval + 1] - self._iterations[interval])

    def consumed_after(self, iteration: int) -> int:
        """Samples consumed by the iterations up to this one."""
        interval = bisect_right(self._iterations, iteration) - 1
        return self._consumed[interval] + (iteration - self._iterations[interval]) * self._batch(interval)

    def iterations_of(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The iterations that consumed these samples."""
        intervals = np.searchsorted(self._consumed, numbers, side="right") - 1
        iterations = np.empty(len(numbers), np.int64)
        for interval in np.unique(intervals).tolist():
            here = intervals == interval
            steps = (numbers[here] - self._consumed[interval]) // self._batch(interval)
            iterations[here] = self._iterations[interval] + steps + 1
        return iterations

    @cached_property
    def tables(self) -> list[DocumentTable]:
        """The documents of each dataset."""
        return [DocumentTable(prefix) for prefix in self.prefixes]

    @cached_property
    def samples(self) -> list[Samples]:
        """The training part of each dataset; it must be what the newest checkpoint was trained on.

        Compared by the documents' lengths alone: removed documents keep their places.
        """
        parts = []
        for prefix in self.prefixes:
            corpus = Corpus.open(prefix)
            documents = split_documents(self.train.split, corpus.documents, prefix)["train"]
            parts.append(Samples(corpus, documents, self.seq_len, self.train.seed))
        for folder in checkpoint_folders(self.folder)[:1]:
            if read_json(folder / "manifest.json")["data"] != Blend(parts, self.blend.weights).identity:
                where = " and ".join(map(str, self.prefixes))
                raise InputError(
                    f"{folder}: was trained on other data than {where} holds now; restore them "
                    f"(workflow.provenance.trace takes --data, if they moved), or move {self.folder} out of its run"
                )
        return parts

    def order(self, corpus: int, epoch: int) -> Order:
        """The order of an epoch of a dataset, from MODEL/trace; made if it is missing."""
        if (corpus, epoch) not in self._orders:
            index = suffixed(self.prefixes[corpus], ".idx")
            if not index.is_file():
                raise InputError(
                    f"{index}: no such file; put it back (workflow.provenance.trace takes --data, if it moved)"
                )
            stat = index.stat()
            fixed = (index.resolve(), stat.st_size, stat.st_mtime_ns, self.train.split, self.train.seed, self.seq_len)
            key = short_hash(repr(fixed))
            path = self.folder / "trace" / f"{corpus}-{epoch}.order"
            order = read_order(path, key) or write_order(path, key, self.samples[corpus].make_epoch(epoch))
            self._orders[corpus, epoch] = order
        return self._orders[corpus, epoch]

    def step(self, iteration: int) -> Iterator[Piece]:
        """Yield what an iteration read, by sample. Raises InputError if it has not been trained."""
        if not 1 <= iteration <= self.trained:
            raise InputError(f"--iteration {iteration}: {self.folder} has iterations 1 to {self.trained}")
        first = self.consumed_after(iteration - 1)
        for number in range(first, self.consumed_after(iteration)):
            corpus, index = self.blend.find(number)
            epoch, place = divmod(index, len(self.order(corpus, 0).epoch.samples))
            for span in self.order(corpus, epoch).epoch.cut(place, self.seq_len):
                yield Piece(number - first, self.prefixes[corpus], self.tables[corpus][span.document], span)

    def reads(self, corpus: int, documents: Sequence[int]) -> Reads:
        """Every reading of documents of a dataset."""
        parts = [Reads(*np.empty((3, 0), np.int64)), *self._reads(corpus, documents, self.consumed)]
        return Reads(*map(np.concatenate, zip(*parts, strict=True)))

    def _reads(
        self, corpus: int, documents: Sequence[int], consumed: int, within: slice = slice(None)
    ) -> Iterator[Reads]:
        """The readings of each epoch among the first `consumed` samples; `within`: these tokens."""
        taken = self.blend.taken(consumed, corpus)
        first = self.order(corpus, 0).epoch
        wanted = np.array([number for number in documents if number < len(first.documents)], np.int64)
        for epoch in range(-(-taken // len(first.samples)) if len(wanted) else 0):
            held = self.order(corpus, epoch).samples_of(wanted, self.seq_len, within)
            index = held.position + epoch * len(first.samples)
            seen = index < taken
            numbers = self.blend.numbers(corpus, index[seen])
            order = np.lexsort((held.document[seen], numbers))
            read = (held.document[seen], self.iterations_of(numbers), held.tokens[seen])
            yield Reads(*(column[order] for column in read))

    def first_read(self, corpus: int, span: Span, last: int) -> tuple[int, int]:
        """The first iteration up to `last` that read a whole span of a dataset, and its tokens.

        If sample borders cut it in every epoch: the first that read a part, and that part's tokens.
        0, 0 if none did.
        """
        within, part = slice(span.first, span.first + span.tokens), (0, 0)
        for reads in self._reads(corpus, [span.document], self.consumed_after(last), within):
            for read in zip(reads.iterations.tolist(), reads.tokens.tolist(), strict=True):
                if read[1] == span.tokens:
                    return read
                part = part if part[0] else read
        return part

    def text(self, piece: Piece) -> str:
        """The text of a piece."""
        corpus = self.samples[self.prefixes.index(piece.dataset)].corpus
        start = int(corpus.starts[piece.span.document]) + piece.span.first
        return self.tokenizer.decode(corpus.tokens[start : start + piece.span.tokens].tolist())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of its data."""
        own = [self.folder / "tokenizer" / name for name in ("encoder.json", "vocab.bpe")]
        tokenize = self.settings.tokenize
        files = own if all(map(Path.is_file, own)) else [tokenize.encoder_json, tokenize.vocab_bpe]
        return Tokenizer(vocabulary_files(*files))

    def checkpoint_before(self, iteration: int) -> Path | None:
        """The newest checkpoint of a smaller iteration."""
        return next((path for path in checkpoint_folders(self.folder) if iteration_of(path) < iteration), None)


if __name__ == "__main__":
    print("error: this command is `python -m workflow.provenance.trace` now", file=sys.stderr)
    sys.exit(2)
