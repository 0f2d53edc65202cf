"""The models and the dataset that the benchmarks of training measure with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.settings import Experiment, ModelSettings, ParallelSettings, Settings, TrainSettings
from corpus.index import IndexWriter, Meta


class Size(NamedTuple):
    """A model, and the amount of work in a measurement."""

    model: ModelSettings
    micro_batch_size: int
    steps: int
    """Steps per round: a few seconds of work."""

    @property
    def rows(self) -> int:
        """Rows of the embedding: the padded vocabulary, which every contender gets."""
        from training.parallel.vocabulary import padded_vocab_size

        return padded_vocab_size(self.model.vocab_size, 1)

    @property
    def flop_per_token(self) -> int:
        """FLOPs per token of a forward and a backward pass, including padding rows, which every contender computes."""
        from training.planning.flops import flops_per_token

        return flops_per_token(self.model.model_copy(update={"vocab_size": self.rows}))


SIZES = {
    "tiny": Size(ModelSettings(n_layer=1, n_head=2, n_embd=32, seq_len=16, vocab_size=256, dropout=0), 2, 1),
    "small": Size(ModelSettings(n_layer=6, n_embd=384, n_head=6, seq_len=256, dropout=0), 4, 2),
    "124m": Size(ModelSettings(n_layer=12, n_embd=768, n_head=12, seq_len=1024, dropout=0), 1, 1),
    "345m": Size(ModelSettings(n_layer=24, n_embd=1024, n_head=16, seq_len=1024, dropout=0), 16, 20),
}


class Job(NamedTuple):
    """The work of the processes of one table row."""

    folder: Path
    """Folder of the dataset, and of the files for the rendezvous."""
    size: Size
    parallel: ParallelSettings = ParallelSettings()
    """The layout of our trainer."""
    micro_batches: int = 1
    """Per step, over all data-parallel ranks."""
    lr: float = 1e-4
    train: Mapping[str, Any] = {}  # never changed
    """More keys of the `train` section of our trainer."""

    @property
    def settings(self) -> Settings:
        """The configuration of our trainer."""
        train = TrainSettings(
            iterations=1,
            micro_batch_size=self.size.micro_batch_size,
            global_batch_size=self.size.micro_batch_size * self.micro_batches,
            split="1,0,0",
            **self.train,
        )
        experiment = Experiment(model=self.size.model, parallel=self.parallel, train=train)
        return Settings(run=self.folder, urls=["-"], models={"step": experiment})


def write_dataset(job: Job) -> None:
    """Write random tokens with the frequencies of words in text, so that there is something to learn."""
    random, model, prefix = np.random.RandomState(1), job.size.model, job.settings.dataset_prefix
    prefix.parent.mkdir(parents=True)
    with IndexWriter(prefix, np.uint16, Meta(model.vocab_size, model.vocab_size - 1)) as writer:
        for _ in range(64):
            writer.add_document((random.zipf(1.2, 4 * model.seq_len) % model.vocab_size).astype(np.uint16))
