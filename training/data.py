"""From a dataset to batches: which documents, in which order, cut into which samples.

    corpus = Corpus.open(prefix)
    train = Samples(corpus, split_documents("949,50,1", corpus.documents)["train"], seq_len=1024, seed=1234)
    tokens, targets = train.batch(range(consumed, consumed + 4))        # two int64 tensors (4, 1024)

The order is a pure function of (seed, corpus, epoch), never of a run's length or layout. An epoch permutes the
documents, lays them end to end, cuts sample i as tokens [i*s, i*s + s] (s inputs and one more target), and permutes the
samples. A run's position is the number of samples it has consumed; epoch follows epoch for ever.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from common.errors import ConfigError, InputError
from corpus.index import IndexedDataset, read_meta

if TYPE_CHECKING:
    from torch import Tensor

PARTS = ("train", "valid", "test")
_SCAN = 1 << 22  # tokens looked at in one go when the vocabulary is checked


class Corpus:
    """A dataset seen as documents laid end to end.

    starts  int64 (D,)  first token of each document in `tokens`
    lengths int64 (D,)  tokens of each document
    """

    def __init__(
        self,
        prefix: Path,
        tokens: npt.NDArray[Any],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> None:
        self.prefix, self.tokens, self.starts, self.lengths = prefix, tokens, starts, lengths
        self.vocab_size = int(np.iinfo(tokens.dtype).max) + 1  # until check_vocabulary tells the true one

    @classmethod
    def open(cls, prefix: Path) -> "Corpus":
        """The dataset PREFIX.bin/.idx, memory-mapped; InputError when it is absent or damaged."""
        dataset = IndexedDataset(prefix)
        edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(dataset.lengths, dtype=np.int64)])
        edges = edges[dataset.document_index]  # (D + 1,): a document may be several sequences, or none
        return cls(prefix, dataset.tokens, edges[:-1], np.diff(edges))

    @classmethod
    def in_memory(cls, name: Path, documents: list[npt.NDArray[np.int64]]) -> "Corpus":
        """Documents that are in no dataset; `name` stands for them in messages."""
        lengths = np.array([len(document) for document in documents], np.int64)
        return cls(name, np.concatenate(documents), np.cumsum(lengths) - lengths, lengths)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @property
    def identity(self) -> str:
        """What tells one corpus from another without reading its tokens: sha256 of the documents' lengths."""
        return hashlib.sha256(self.lengths.tobytes()).hexdigest()

    def check_vocabulary(self, vocab_size: int, key: str) -> None:
        """InputError when the dataset was made with another vocabulary than the model's; `key` names the model's.

        A dataset without PREFIX.json (made by other tools) is read once from end to end. From here on every token
        read is checked, so that a damaged file never reaches the model.
        """
        self.vocab_size = vocab_size
        meta = read_meta(self.prefix)
        if meta is not None:
            if meta.vocab_size != vocab_size:
                raise InputError(
                    f"{self.prefix}: made with a vocabulary of {meta.vocab_size}, but {key} is {vocab_size}; "
                    f"set {key} to {meta.vocab_size} or tokenize again"
                )
            return
        largest = max((int(self.tokens[i : i + _SCAN].max()) for i in range(0, len(self.tokens), _SCAN)), default=0)
        if largest >= vocab_size:
            raise InputError(
                f"{self.prefix}: holds token id {largest}, but {key} is {vocab_size}; set {key} above {largest}"
            )


def split_documents(split: str, documents: int) -> dict[str, range]:
    """Contiguous ranges of documents for train, valid and test, in the proportions of `split` ("949,50,1").

    Raises ConfigError for shares that are no three numbers, and when a training or validation part whose share is
    not 0 would get no document; the message names a split that works.
    """
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    if len(shares) != len(PARTS) or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ConfigError(f"train.split {split!r} must be three shares for train, valid and test, such as 949,50,1")
    edges = [0, *(round(documents * sum(shares[: part + 1]) / sum(shares)) for part in range(len(PARTS)))]
    parts = {name: range(edges[i], edges[i + 1]) for i, name in enumerate(PARTS)}
    for name, share in zip(PARTS, shares, strict=True):
        wanted = name == "train" or (name == "valid" and share > 0)
        if wanted and not parts[name]:
            works = f"{documents - 1},1,0" if documents > 1 and shares[1] else "1,0,0"
            raise ConfigError(
                f"train.split {split} leaves no document for {name}: the corpus has {documents}; "
                + (f"{works} is the smallest split that works" if documents else "make a corpus with documents")
            )
    return parts


class Samples:
    """The samples of a range of documents, by running number from 0 to infinity.

    With a seed: shuffled, anew in every epoch. Without: in the corpus' own order (validation).
    """

    def __init__(self, corpus: Corpus, part: range, seq_len: int, seed: int | None = None) -> None:
        self.corpus, self.part, self.seq_len, self.seed = corpus, part, seq_len, seed
        self.documents = len(part)
        self.tokens = int(corpus.lengths[part.start : part.stop].sum())
        self.per_epoch = max(0, (self.tokens - 1) // seq_len)
        self._epoch = -1  # of the arrays below
        self._documents: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._ends: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._samples: npt.NDArray[np.int64] | range = range(0)

    def require_one(self, part: str) -> None:
        """InputError when the documents hold not even one sample."""
        if not self.per_epoch:
            raise InputError(
                f"{self.corpus.prefix}: the {part} part holds {self.tokens} tokens in {self.documents} documents, "
                f"fewer than one sample of model.seq_len + 1 = {self.seq_len + 1}; lower model.seq_len, "
                f"give train.split a larger {part} share, or use more text"
            )

    def _enter_epoch(self, epoch: int) -> None:
        """Lay out one epoch: 16 bytes a document and 8 a sample."""
        documents = np.arange(self.part.start, self.part.stop, dtype=np.int64)
        samples: npt.NDArray[np.int64] | range = range(self.per_epoch)
        if self.seed is not None:
            # RandomState, not Generator: NumPy promises that its permutations never change between versions
            random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self.seed, epoch])))
            random.shuffle(documents)
            samples = random.permutation(self.per_epoch)
        self._documents, self._samples = documents, samples
        self._ends = np.cumsum(self.corpus.lengths[documents])
        self._epoch = epoch

    def sample(self, number: int) -> npt.NDArray[np.int64]:
        """Tokens of sample `number`, counted over all epochs, shape (seq_len + 1,)."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._enter_epoch(epoch)
        return self._read(int(self._samples[place]) * self.seq_len, self.seq_len + 1)

    def tail(self) -> npt.NDArray[np.int64]:
        """The tokens behind the last whole sample of an unshuffled part, with the one that predicts them first."""
        if self._epoch != 0:
            self._enter_epoch(0)
        begin = self.per_epoch * self.seq_len
        return self._read(begin, self.tokens - begin)

    def _read(self, begin: int, wanted: int) -> npt.NDArray[np.int64]:
        """`wanted` tokens from place `begin` of this epoch's documents laid end to end."""
        document = int(np.searchsorted(self._ends, begin, side="right"))  # skips empty documents
        pieces: list[npt.NDArray[np.int64]] = []
        while wanted:
            end = int(self._ends[document])
            take = min(wanted, end - begin)
            which = self._documents[document]
            start = int(self.corpus.starts[which] + self.corpus.lengths[which]) - (end - begin)
            pieces.append(self.corpus.tokens[start : start + take].astype(np.int64))
            wanted, begin, document = wanted - take, begin + take, document + 1
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        if tokens.size and (tokens.max() >= self.corpus.vocab_size or tokens.min() < 0):
            wrong = tokens.max() if tokens.min() >= 0 else tokens.min()
            raise InputError(
                f"{self.corpus.prefix}: holds token id {wrong}, outside the vocabulary of {self.corpus.vocab_size}; "
                "damaged: make the dataset again"
            )
        return tokens

    def batch(self, numbers: Sequence[int]) -> "tuple[Tensor, Tensor]":
        """Inputs and targets of several samples, two int64 tensors (len(numbers), seq_len) on the CPU."""
        import torch

        tokens = torch.from_numpy(np.stack([self.sample(number) for number in numbers]))
        return tokens[:, :-1], tokens[:, 1:]


def rank_samples(consumed: int, micro: int, data_rank: int, data_size: int, accumulation: int) -> list[range]:
    """The samples of one data-parallel rank in the global batch that begins at `consumed`, a range a micro-batch.

    The union over ranks is [consumed, consumed + micro * data_size * accumulation) whatever the layout.
    """
    first = consumed + data_rank * micro
    step = data_size * micro
    return [range(first + i * step, first + i * step + micro) for i in range(accumulation)]
