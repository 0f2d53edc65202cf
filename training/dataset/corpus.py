"""Turn a dataset into samples: choose documents, order them, cut them into windows of tokens.

    opened = Corpus.open(prefix)
    documents = split_documents("949,50,1", opened.documents)["train"]
    train = Samples(opened, documents, seq_len=1024, seed=1234)
    tokens = train.sample(consumed)        # int64 (1025,)

The order is a pure function of (seed, corpus, epoch), never of a run's length or layout. An epoch
permutes the documents, concatenates them, cuts sample i as tokens [i*s, i*s + s] (s inputs and one
more target), and permutes the samples. A run's position is the number of samples that it has
consumed; there are always more epochs.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from mmap import MADV_RANDOM, mmap
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from common.errors import ConfigError, InputError
from common.files import read_documents, read_lines
from common.settings.training import split_shares
from common.tokenizer import Tokenizer
from corpus.index import IndexedDataset, content_of, read_meta
from training.huggingface.tokenizer import vocabulary_size

PARTS = ("train", "valid", "test")
_SCAN = 1 << 22  # tokens per read of the vocabulary check


class Corpus:
    """A dataset as a concatenation of documents.

    starts      int64 (D,)  first token of each document in `tokens`
    lengths     int64 (D,)  tokens of each document
    end_of_text             ends a document; without PREFIX.json that of the run's tokenizer, if
                            it has as many tokens, else the vocabulary's last id
    vocabulary              hash of its merges; empty if not known
    """

    def __init__(
        self, prefix: Path, tokens: npt.NDArray[Any], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> None:
        self.prefix, self.tokens, self.starts, self.lengths = prefix, tokens, starts, lengths
        self.vocab_size = int(np.iinfo(tokens.dtype).max) + 1  # until check_vocabulary sets the true one
        self.end_of_text, self.vocabulary = self.vocab_size - 1, ""

    @classmethod
    def open(cls, prefix: Path) -> "Corpus":
        """The dataset PREFIX.bin/.idx, memory-mapped. Raises InputError if missing or damaged."""
        dataset = IndexedDataset(prefix)
        if isinstance(dataset.tokens.base, mmap):
            # samples are far apart: read-ahead is wasted, and makes a read take 8 times as long
            dataset.tokens.base.madvise(MADV_RANDOM)
        bounds = np.append(dataset.pointers, dataset.tokens.nbytes)  # (S + 1,) of the sequences, in bytes
        # (D + 1,): a document may be several sequences, or none
        edges = bounds[dataset.document_index] // dataset.dtype.itemsize
        return cls(prefix, dataset.tokens, edges[:-1], np.diff(edges))

    @classmethod
    def of_text(cls, path: Path, tokenizer: Tokenizer) -> "Corpus":
        """The documents of a text or JSON-lines file, each followed by end-of-text, in memory."""
        if ".jsonl" in path.suffixes:
            texts: Iterable[str] = (document["text"] for document in read_documents(path))
        else:
            texts = [b"\n".join(read_lines(path)).decode("utf-8", errors="replace")]
        documents = [np.append(tokenizer.encode(text).astype(np.int64), tokenizer.end_of_text) for text in texts]
        if not documents:
            raise InputError(f"{path}: no documents")
        corpus = cls.in_memory(path, documents)
        corpus.end_of_text = tokenizer.end_of_text
        return corpus

    @classmethod
    def in_memory(cls, name: Path, documents: list[npt.NDArray[np.int64]]) -> "Corpus":
        """A corpus of documents in memory; messages refer to it by `name`."""
        lengths = np.array([len(document) for document in documents], np.int64)
        return cls(name, np.concatenate(documents), np.cumsum(lengths) - lengths, lengths)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @property
    def identity(self) -> str:
        """sha256 of the documents' lengths: identifies a corpus without reading its tokens."""
        return hashlib.sha256(self.lengths.tobytes()).hexdigest()

    @cached_property
    def content(self) -> str:
        """A hash of the tokens; see `corpus.index.content_of`."""
        return content_of(self.prefix)

    def check_vocabulary(
        self, vocab_size: int, key: str, tokenizer: Callable[[], Tokenizer | None] = lambda: None
    ) -> None:
        """Raise InputError if the dataset's vocabulary is not the model's, the setting `key`.

        A dataset without PREFIX.json (made by other tools) is read once from end to end, and needs
        `tokenizer`. From here on every token that is read is checked, so that a damaged file never
        reaches the model.
        """
        self.vocab_size, self.end_of_text = vocab_size, vocab_size - 1
        meta = read_meta(self.prefix)
        if meta is not None:
            if meta.vocab_size != vocab_size:
                raise InputError(
                    f"{self.prefix}: made with a vocabulary of {meta.vocab_size}, but {key} is {vocab_size}; "
                    f"set {key} to {meta.vocab_size} or tokenize again"
                )
            self.end_of_text, self.vocabulary = meta.end_of_text, meta.vocabulary
            return
        largest = max((int(self.tokens[i : i + _SCAN].max()) for i in range(0, len(self.tokens), _SCAN)), default=0)
        if largest >= vocab_size:
            raise InputError(
                f"{self.prefix}: holds token id {largest}, but {key} is {vocab_size}; set {key} above {largest}"
            )
        theirs = tokenizer()
        if theirs is not None and vocabulary_size(theirs) == vocab_size:
            self.end_of_text = theirs.end_of_text

    def check_end_of_text(self, key: str) -> None:
        """Raise InputError if the first document lacks the `end_of_text` that `key` needs."""
        filled = np.flatnonzero(self.lengths[:_SCAN])
        if len(filled) and self.tokens[self.starts[filled[0]] + self.lengths[filled[0]] - 1] != self.end_of_text:
            raise InputError(
                f"{self.prefix}: document {filled[0]} does not end with end-of-text (id {self.end_of_text}), "
                f"which {key} looks for; turn {key} off, or tokenize with append_eod"
            )


def split_documents(
    split: str, documents: int, corpus: object = "the corpus", key: str = "train.split"
) -> dict[str, range]:
    """Contiguous ranges of documents for train, valid and test, in the proportions of `split`.

    A part with a share above 0 gets at least one document. Raises ConfigError, with the names
    `corpus` and `key`, if the shares are not three numbers or the documents are too few.
    """
    try:
        shares = split_shares(split)
    except ValueError as error:
        raise ConfigError(f"{key} {error}") from None
    wanted = sum(share > 0 for share in shares)
    if documents < wanted:
        raise ConfigError(
            f"{key} {split} has {wanted} parts, but {corpus} has {documents} documents; "
            "give more documents, or parts a share of 0"
        )
    edges = [0, *(round(documents * sum(shares[: part + 1]) / sum(shares)) for part in range(len(PARTS)))]
    sizes = [max(edges[part + 1] - edges[part], int(share > 0)) for part, share in enumerate(shares)]
    sizes[sizes.index(max(sizes))] -= sum(sizes) - documents  # at most two too many
    ends = np.cumsum(sizes).tolist()
    return {name: range(end - size, end) for name, size, end in zip(PARTS, sizes, ends, strict=True)}


class Span(NamedTuple):
    """Tokens of one document."""

    document: int  # its number in the corpus
    first: int  # index of the first of these tokens in the document
    tokens: int  # how many


@dataclass(frozen=True)
class Epoch:
    """One pass over some documents: 16 bytes per document and 8 per sample."""

    documents: npt.NDArray[np.int64]  # (D,) numbers in the order of their concatenation
    ends: npt.NDArray[np.int64]  # (D,) the end of each in tokens: cumulative lengths
    samples: npt.NDArray[np.int64] | range  # (S,) the order of the samples cut from the concatenation

    def spans(self, begin: int, wanted: int) -> Iterator[Span]:
        """The spans that hold `wanted` tokens from index `begin` of the concatenation."""
        place = int(np.searchsorted(self.ends, begin, side="right"))  # skips empty documents
        while wanted:
            end, document_begin = int(self.ends[place]), int(self.ends[place - 1]) if place else 0
            take = min(wanted, end - begin)
            if take:
                yield Span(int(self.documents[place]), begin - document_begin, take)
            wanted, begin, place = wanted - take, begin + take, place + 1

    def cut(self, place: int, seq_len: int) -> Iterator[Span]:
        """The spans of the sample at this index of the order."""
        return self.spans(int(self.samples[place]) * seq_len, seq_len + 1)


def permutation(size: int, *seed: int) -> npt.NDArray[np.int64]:
    """The numbers below `size` in random order, a pure function of (size, seed).

    Sorts random keys that hold their number in the low bits: takes half the time of a shuffle and
    releases the GIL. NumPy guarantees PCG64's stream, and distinct keys sort in one way.
    """
    bits = np.uint64(size.bit_length())
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(size)
    keys >>= bits
    keys <<= bits
    keys |= np.arange(size, dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << bits) - np.uint64(1)
    return keys.view(np.int64)


class Samples:
    """The samples of a range of documents, by number from 0 to infinity. Thread-safe.

    With a seed they are shuffled, differently in every epoch; without, in the corpus' order.
    """

    def __init__(self, corpus: Corpus, part: range, seq_len: int, seed: int | None = None) -> None:
        self.corpus, self.part, self.seq_len, self.seed = corpus, part, seq_len, seed
        self.documents = len(part)
        self.tokens = int(corpus.lengths[part.start : part.stop].sum())
        self.per_epoch = max(0, (self.tokens - 1) // seq_len)
        self._epochs: dict[int, Epoch] = {}
        self._lock = Lock()

    def require_one(self, part: str) -> None:
        """Raise InputError if the documents hold fewer tokens than one sample."""
        if not self.per_epoch:
            raise InputError(
                f"{self.corpus.prefix}: the {part} part holds {self.tokens} tokens in {self.documents} documents, "
                f"fewer than one sample of model.seq_len + 1 = {self.seq_len + 1}; lower model.seq_len, "
                f"give train.split a larger {part} share, or use more text"
            )

    def make_epoch(self, epoch: int) -> Epoch:
        """The order of one epoch."""
        samples: npt.NDArray[np.int64] | range = range(self.per_epoch)
        if self.seed is None:
            documents = np.arange(self.part.start, self.part.stop, dtype=np.int64)
        else:
            documents = permutation(self.documents, self.seed, epoch, 0) + self.part.start
            samples = permutation(self.per_epoch, self.seed, epoch, 1)
        return Epoch(documents, np.cumsum(self.corpus.lengths[documents]), samples)

    def _epoch(self, number: int) -> Epoch:
        """Epoch `number`; the previous one is kept for threads that read ahead."""
        if self.seed is None:
            number = 0
        with self._lock:
            if number not in self._epochs:
                self._epochs = {old: epoch for old, epoch in self._epochs.items() if old >= number - 1}
                self._epochs[number] = self.make_epoch(number)
            return self._epochs[number]

    def sample(self, number: int) -> npt.NDArray[np.int64]:
        """The tokens of sample `number`, counted over all epochs, shape (seq_len + 1,)."""
        return self._read(self.spans(number))

    def spans(self, number: int) -> Iterator[Span]:
        """The spans of sample `number`, counted over all epochs."""
        epoch, place = divmod(number, self.per_epoch)
        return self._epoch(epoch).cut(place, self.seq_len)

    def tail(self) -> npt.NDArray[np.int64]:
        """The last token of an unshuffled part's last full sample, and the tokens after it."""
        begin = self.per_epoch * self.seq_len
        return self._read(self._epoch(0).spans(begin, self.tokens - begin))

    def _read(self, spans: Iterable[Span]) -> npt.NDArray[np.int64]:
        """The tokens of some spans, one after the other."""
        pieces: list[npt.NDArray[np.int64]] = []
        for span in spans:
            start = int(self.corpus.starts[span.document]) + span.first
            pieces.append(self.corpus.tokens[start : start + span.tokens].astype(np.int64))
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        if tokens.size and (tokens.max() >= self.corpus.vocab_size or tokens.min() < 0):
            wrong = tokens.max() if tokens.min() >= 0 else tokens.min()
            raise InputError(
                f"{self.corpus.prefix}: holds token id {wrong}, outside the vocabulary of {self.corpus.vocab_size}; "
                "damaged: make the dataset again"
            )
        return tokens
