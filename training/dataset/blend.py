"""Blend several corpora into one stream of samples, in given proportions; open a model's data.

    blend = Blend([books, web], [0.3, 0.7])
    tokens = blend.sample(consumed)        # int64 (seq_len + 1,)
    splits = open_splits(datasets, train, model, "tiny")

After n samples, for every n, the number taken from each corpus is within one sample of n times its
weight (Tijdeman 1980, "The chairman assignment problem": within 1 - 1/(2k - 2) for k corpora).
Weights become the smallest integers with the same ratios; their sum is the period of the choice, so
that sample n is found directly. Ratios that need a period over 2^20 are rounded to multiples of
2^-20; `Blend.rounding` says by how much.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.errors import InputError
from common.settings import DataSettings, ModelSettings, TrainSettings
from common.settings.training import DOCUMENT_RULES
from common.tokenizer import Tokenizer
from training.dataset.corpus import PARTS, Corpus, Samples, split_documents

MAX_PERIOD = 1 << 20  # ratios of weights that need a longer period are rounded


def exact_weights(weights: Sequence[float]) -> list[Fraction]:
    """The weights as exact fractions with a sum of 1: 0.1 is exactly 1/10."""
    written = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(written) for weight in written]


def integer_weights(weights: Sequence[float]) -> list[int]:
    """The smallest integers in the ratio of `weights` (all positive) whose sum is at most 2^20."""
    exact = exact_weights(weights)
    denominator = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * denominator) for weight in exact]
    divisor = math.gcd(*whole)
    if sum(whole) // divisor <= MAX_PERIOD:
        return [weight // divisor for weight in whole]
    rounded = [max(1, round(Fraction(weight * MAX_PERIOD, sum(whole)))) for weight in whole]
    rounded[rounded.index(max(rounded))] += MAX_PERIOD - sum(rounded)
    return rounded


def schedule(weights: Sequence[int]) -> npt.NDArray[np.uint16]:
    """The corpus of each sample in a period, shape (sum(weights),).

    Corpus i's next sample is due once it lags n * w_i / W by 1 / (2k - 2), and must be taken before
    it lags by 1 - 1 / (2k - 2). Of the corpora that are due, the earliest deadline comes first.
    """
    period, slack = sum(weights), max(1, 2 * len(weights) - 2)
    taken = [0] * len(weights)
    waiting = [(0, corpus) for corpus in range(len(weights))]  # (first sample at which it is due, corpus)
    urgent: list[tuple[int, int]] = []  # (deadline, corpus)
    chosen = np.empty(period, dtype=np.uint16)
    for number in range(period):
        while waiting and waiting[0][0] <= number:
            corpus = heappop(waiting)[1]
            deadline = period * (slack * (taken[corpus] + 1) - 1) // (slack * weights[corpus])
            heappush(urgent, (deadline, corpus))
        corpus = heappop(urgent)[1]
        chosen[number] = corpus
        taken[corpus] += 1
        # the least n with slack * (n * weight - period * taken) >= period, less 1
        due = -(-period * (slack * taken[corpus] + 1) // (slack * weights[corpus])) - 1
        heappush(waiting, (due, corpus))
    return chosen


class Blend:
    """The samples of one or more corpora by number; the weights need not add up to 1."""

    def __init__(self, parts: Sequence[Samples], weights: Sequence[float]) -> None:
        self.parts = tuple(parts)
        self.weights = integer_weights(weights)
        self.period = sum(self.weights)
        shares = zip(self.weights, exact_weights(weights), strict=True)
        self.rounding = max(abs(Fraction(weight, self.period) - exact) for weight, exact in shares)
        """The largest difference between a corpus' share and its weight."""
        self._corpus = schedule(self.weights)
        self._index = np.empty(self.period, dtype=np.int32)  # among its corpus' samples in a period
        for corpus, weight in enumerate(self.weights):
            self._index[self._corpus == corpus] = np.arange(weight)

    @cached_property
    def identity(self) -> str:
        """A hash of the weights and the corpora's document lengths; of one corpus, its identity."""
        if len(self.parts) == 1:
            return self.parts[0].corpus.identity
        pairs = zip(self.parts, self.weights, strict=True)
        return hashlib.sha256(";".join(f"{part.corpus.identity}:{w}" for part, w in pairs).encode()).hexdigest()

    @cached_property
    def content(self) -> list[str]:
        """A hash of each corpus' tokens (`corpus.index.content_of`)."""
        return [part.corpus.content for part in self.parts]

    @property
    def end_of_text(self) -> int:
        """Id of the token that ends a document; equal in all corpora of a model."""
        return self.parts[0].corpus.end_of_text

    @property
    def per_epoch(self) -> int:
        """Samples before one of the corpora repeats."""
        return min(int(self.numbers(corpus, part.per_epoch)) for corpus, part in enumerate(self.parts))

    def numbers(self, corpus: int, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The stream's numbers for these indices of a corpus' samples; the inverse of `find`."""
        periods, rest = np.divmod(indices, self.weights[corpus])
        return np.asarray(periods * self.period + np.flatnonzero(self._corpus == corpus)[rest], np.int64)

    def find(self, number: int) -> tuple[int, int]:
        """The corpus of sample `number`, and the sample's index in it."""
        periods, rest = divmod(number, self.period)
        corpus = int(self._corpus[rest])
        return corpus, periods * self.weights[corpus] + int(self._index[rest])

    def taken(self, samples: int, corpus: int) -> int:
        """The number of the first `samples` of the stream that come from a corpus."""
        periods, rest = divmod(samples, self.period)
        return periods * self.weights[corpus] + int(np.count_nonzero(self._corpus[:rest] == corpus))

    def sample(self, number: int) -> npt.NDArray[np.int64]:
        """The tokens of sample `number`, shape (seq_len + 1,)."""
        corpus, index = self.find(number)
        return self.parts[corpus].sample(index)


class Splits(NamedTuple):
    """A model's data."""

    train: Blend
    valid: Blend
    test: Blend | None  # None if a corpus has no whole sample for it


def open_training_part(datasets: Sequence[DataSettings], train: TrainSettings, seq_len: int) -> Blend:
    """The training part of a model's data in the corpora's order, from their indices alone.

    Raises InputError if a dataset is missing, damaged, or smaller than a sample.
    """
    parts = list[Samples]()
    for source in datasets:
        corpus = Corpus.open(source.prefix)
        documents = split_documents(train.split, corpus.documents, source.prefix)["train"]
        parts.append(Samples(corpus, documents, seq_len))
        parts[-1].require_one("train")
    return Blend(parts, [source.weight for source in datasets])


def open_splits(
    datasets: Sequence[DataSettings],
    train: TrainSettings,
    model: ModelSettings,
    name: str,
    tokenizer: Callable[[], Tokenizer | None] = lambda: None,
) -> Splits:
    """Open the corpora of the model `name` and check them; `tokenizer` is called if one needs it.

    Raises InputError or ConfigError if a corpus is missing or has another vocabulary, if a part has
    no document, or if training or validation get no whole sample; the test part may be smaller.
    """
    parts: dict[str, list[Samples]] = {part: [] for part in PARTS}
    ends: dict[int, Path] = {}  # a prefix for each end-of-text token
    vocabularies: dict[str, Path] = {}  # a prefix for each hash
    for source in datasets:
        corpus = Corpus.open(source.prefix)
        corpus.check_vocabulary(model.vocab_size, f"models.{name}.model.vocab_size", tokenizer)
        for key in DOCUMENT_RULES:
            if getattr(train, key):
                corpus.check_end_of_text(f"models.{name}.train.{key}")
        ends.setdefault(corpus.end_of_text, source.prefix)
        vocabularies.setdefault(corpus.vocabulary, source.prefix)
        for part, documents in split_documents(train.split, corpus.documents, source.prefix).items():
            seed = train.seed if part == "train" else None  # only training data are shuffled
            samples = Samples(corpus, documents, model.seq_len, seed)
            if documents and part != "test":
                samples.require_one(part)
            parts[part].append(samples)
    if len(ends) > 1:
        closing = " and ".join(f"{prefix} with token {end}" for end, prefix in ends.items())
        raise InputError(f"{closing} close their documents: one model needs one vocabulary")
    vocabularies.pop("", None)  # not known
    if len(vocabularies) > 1:
        made = " and ".join(map(str, vocabularies.values()))
        raise InputError(
            f"{made} have other merges in a vocabulary of the same size; tokenize them with one vocabulary"
        )
    weights = [source.weight for source in datasets]
    blends = {part: Blend(samples, weights) for part, samples in parts.items()}
    test = blends["test"]
    return Splits(blends["train"], blends["valid"], test if test.per_epoch else None)
