"""Opens the corpora of a model, split into training, validation and test data, and checks that they fit the model.

splits = open_splits(datasets, experiment, "tiny")
tokens = splits.train.sample(0)        # int64 (seq_len + 1,)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import InputError
from common.settings import DataSettings, Experiment
from training.dataset.blend import Blend
from training.dataset.corpus import PARTS, Corpus, Samples, split_documents


class Splits(NamedTuple):
    """A model's data."""

    train: Blend
    valid: Blend
    test: Blend | None
    """None if a corpus has no whole sample for it."""


def open_splits(datasets: Sequence[DataSettings], experiment: Experiment, name: str) -> Splits:
    """Open the corpora of the model `name` and check them.

    Raises InputError or ConfigError if a corpus is missing or was made with another vocabulary, if a split gets no
    document, or if training or validation get no whole sample. The test split may be smaller: it is only reported.
    """
    train = experiment.train
    parts: dict[str, list[Samples]] = {part: [] for part in PARTS}
    ends: dict[int, Path] = {}  # a prefix for each end-of-text token
    for source in datasets:
        corpus = Corpus.open(source.prefix)
        corpus.check_vocabulary(experiment.model.vocab_size, f"models.{name}.model.vocab_size")
        for key in ("reset_position_ids", "eod_mask_loss"):
            if getattr(train, key):
                corpus.check_end_of_text(f"models.{name}.train.{key}")
        ends.setdefault(corpus.end_of_text, source.prefix)
        for part, documents in split_documents(train.split, corpus.documents, source.prefix).items():
            seed = train.seed if part == "train" else None  # only training data are shuffled
            samples = Samples(corpus, documents, experiment.model.seq_len, seed)
            if documents and part != "test":
                samples.require_one(part)
            parts[part].append(samples)
    if len(ends) > 1:
        closing = " and ".join(f"{prefix} with token {end}" for end, prefix in ends.items())
        raise InputError(f"{closing} close their documents: one model needs one vocabulary")
    weights = [source.weight for source in datasets]
    blends = {part: Blend(samples, weights) for part, samples in parts.items()}
    test = blends["test"]
    return Splits(blends["train"], blends["valid"], test if test.per_epoch else None)
