"""The type of the residual stream: the trainer's own, bfloat16, against float32.

Each seed trains one model three times with the trainer's own step, from the same weights on the same batches. "float32
stream" is what autocast does: embeddings, sums and LayerNorms are float32; what a LayerNorm returns is rounded, so
attention, MLP and head compute in bfloat16. "float32" rounds nothing. The last table has the mean difference from the
bfloat16 stream, and its standard error over the seeds.
"""

import random
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from math import sqrt
from statistics import mean, stdev
from typing import Any

from benchmarks.harness import Row, timed
from benchmarks.inputs import cut, packaged_texts, read_texts, write_documents
from benchmarks.step import Job, Size, opened
from common.settings import ModelSettings, TokenizeSettings, TrainTokenizerSettings

_ARMS = {"bfloat16 stream": "bfloat16", "float32 stream": "float32", "float32": "float32"}  # -> train.precision
_MODEL = ModelSettings(n_layer=12, n_head=2, n_embd=128, seq_len=128, vocab_size=2048, dropout=0)
_TRAIN = {"lr": 2e-3, "min_lr": 2e-4, "warmup": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "split": "90,10,0"}


def write_dataset(job: Job, texts: Iterator[str]) -> None:
    """Tokenize up to 1,000 documents of the texts, in a random order, with a vocabulary trained on them."""
    from common.tokenizer import VocabularyFiles
    from corpus.tokenize import tokenize
    from corpus.train_tokenizer import train_tokenizer

    documents = cut(texts, 1000)
    random.Random(1).shuffle(documents)  # training and held-out documents come from all texts
    source = write_documents(job.folder / "in.jsonl.zst", documents)
    files = VocabularyFiles(job.folder / "encoder.json", job.folder / "vocab.bpe")
    train_tokenizer([source], files, TrainTokenizerSettings(vocab_size=job.size.model.vocab_size))
    vocabulary = TokenizeSettings(encoder_json=files.encoder_json, vocab_bpe=files.vocab_bpe)
    tokenize([source], job.folder / "dataset" / "corpus", vocabulary)


def losses(job: Job, arm: str) -> dict[str, float]:
    """Train, and return the mean loss of the last fifth of the steps and the loss of the held-out documents."""
    from training.optimizer import learning_rate
    from training.step import step_batches, train_step, validate

    found = []
    with opened(job) as (plan, session):
        if arm == "float32 stream":
            _round_after_norms(session.stages[0])
        train, data = plan.experiment.train, plan.data
        with closing(step_batches(session, data.train, 0)) as batches:
            for taken in range(train.iterations):
                rate = learning_rate(taken, train)
                found.append(train_step(session, taken + 1, next(batches), rate).loss)
                session.timers.collect()
        held_out = validate(session, data.valid, data.valid.per_epoch)
    return {"last fifth": mean(found[-max(1, len(found) // 5) :]), "held out": held_out}


def _round_after_norms(model: Any) -> None:
    """Round what the LayerNorms of a module return to bfloat16, but not the stream."""
    from torch.nn import LayerNorm

    def rounded(_module: LayerNorm, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # ResidualNorm's: the stream and its LayerNorm
            return output[0], output[1].bfloat16()
        return output.bfloat16()

    for module in model.modules():
        if isinstance(module, LayerNorm):
            module.register_forward_hook(rounded)


def measure(arguments: Namespace) -> Iterator[Row]:
    """Losses with a bfloat16 and with a float32 residual stream, each seed on the same batches; minutes per row."""
    texts = chain.from_iterable(map(read_texts, arguments.texts)) if arguments.texts else packaged_texts()
    size, found = Size(_MODEL, 8, arguments.count), dict[str, list[dict[str, float]]]()
    write_dataset(Job(arguments.work, size), texts)
    for seed in range(1, arguments.rounds + 1):
        for arm, precision in _ARMS.items():
            keys = {**_TRAIN, "iterations": arguments.count, "precision": precision, "seed": seed, "compile": "none"}
            run = timed(partial(losses, Job(arguments.work, size, keys), arm))
            found.setdefault(arm, []).append(run.columns)
            yield {f"seed {seed}": arm, **run.columns, "s": run.wall}
    first = found.pop("bfloat16 stream")
    for arm, runs in found.items():
        row: dict[str, Any] = {"minus bfloat16 stream": arm}
        for name in first[0]:
            each = [run[name] - other[name] for run, other in zip(runs, first, strict=True)]
            row |= {name: mean(each), f"{name}, ±": stdev(each) / sqrt(len(each)) if len(each) > 1 else None}
        yield row
