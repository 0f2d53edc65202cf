"""Benchmarks of training and of converting checkpoints.

    python -m benchmarks.training data
    python -m benchmarks.training convert --size 345m

Each prints tables for docs/benchmarks_training.md; a ratio is the speed relative to a peer in the same run.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import checkpoint, convert, harness, ledger, step
from benchmarks.harness import Case, Contender, Row, Timed, compare
from common import cli
from common.errors import ToolkitError
from common.settings import GenerateSettings

_SEQ_LEN = 1024

# ------------------------------------------------------------------------------------------------ data order


def write_dataset(prefix: Path, documents: int) -> None:
    """Write PREFIX.idx with documents of 128 to 2,171 tokens, and a sparse PREFIX.bin."""
    from corpus.index.layout import HEADER, MAGIC

    lengths = np.random.RandomState(0).randint(128, 2172, size=documents).astype("<i4")
    pointers = np.concatenate([[0], np.cumsum(2 * lengths.astype(np.int64))])
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        for part in (lengths, pointers[:-1].astype("<i8"), np.arange(documents + 1, dtype="<i8")):
            file.write(part.tobytes())
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(int(pointers[-1]))


def our_order(prefix: Path, small: Path) -> Timed:
    """Open the corpus, compute the order of its first epoch, and read a sample."""
    from training.dataset.corpus import Corpus, Samples

    def run(prefix: Path) -> None:
        corpus = Corpus.open(prefix)
        Samples(corpus, range(corpus.documents), _SEQ_LEN, seed=1).sample(0)

    run(small)
    return _with_memory(lambda: run(prefix))


def megatron_order(prefix: Path, small: Path) -> Timed:
    """The work of megatron-core's GPTDataset for one epoch (its C++ helper and shuffles), without its cache on disk."""
    from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index
    from megatron.core.datasets.helpers import build_sample_idx
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    def run(prefix: Path) -> None:
        dataset = IndexedDataset(str(prefix))
        sizes = dataset.sequence_lengths  # lies in the dataset's memory
        random = np.random.RandomState(1)
        order = _build_document_index(np.arange(len(sizes), dtype=np.int32), 1, random, False)
        samples = build_sample_idx(sizes, order, _SEQ_LEN, 1, int(sizes.sum(dtype=np.int64)), True, True)
        _build_shuffle_index(len(samples) - 1, len(samples) - 1, random)

    run(small)
    return _with_memory(lambda: run(prefix))


def _with_memory(run: Callable[[], None]) -> Timed:
    """Also what this takes beyond the libraries and a small dataset."""
    before = harness.peak_memory()

    def measured() -> dict[str, float]:
        run()
        return {"MB of the order": (harness.peak_memory() - before) / 1e6}

    return measured


def data(arguments: Namespace) -> Iterator[Row]:
    """From PREFIX on disk to the first sample of an epoch, beside megatron-core's C++ helper."""
    prefix, small = arguments.work / "corpus", arguments.work / "small"
    write_dataset(prefix, arguments.count)
    write_dataset(small, 50)
    contenders = [Contender("training.dataset", our_order, (prefix, small), bar=1.76)]
    if find_spec("megatron"):
        contenders.insert(0, Contender("megatron-core", megatron_order, (prefix, small)))
    yield from compare("order of an epoch", contenders, arguments.rounds, arguments.count, "documents")


# ------------------------------------------------------------------------------------------------ generating


def generate(arguments: Namespace) -> Iterator[Row]:
    """124M, random weights, float32, greedy, a prompt of 32 tokens: ours beside transformers, both with a KV cache.

    The last rows, a table of their own, continue 8 prompts in a batch, the first of them the same.
    """
    import torch

    from training.inference.load import load_model
    from training.inference.sampling import continue_tokens

    settings = step.SIZES[arguments.size].model.model_copy(update={"seq_len": 1024})
    theirs = step.hugging_face(settings, settings.vocab_size).eval()
    theirs.save_pretrained(arguments.work / "model")
    ours, _ = load_model(arguments.work / "model")
    device = next(ours.parameters()).device
    theirs.to(device)
    end = settings.vocab_size - 1
    prompts = torch.randint(end, (8, 32), generator=torch.Generator().manual_seed(1)).tolist()
    first = torch.tensor([prompts[0]], device=device)

    def peer(texts: list[list[int]], count: int) -> list[list[int]]:
        given = torch.tensor(texts, device=device)
        options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "pad_token_id": end}
        found = theirs.generate(given, attention_mask=torch.ones_like(given), **options)
        return [tokens[32:].tolist() for tokens in found]

    def cached(texts: list[list[int]], count: int) -> list[list[int]]:
        return continue_tokens(ours, texts, GenerateSettings(max_tokens=count, temperature=0), end)

    def uncached(count: int) -> list[list[int]]:
        text = first
        with torch.inference_mode():
            for _ in range(count):
                text = torch.cat([text, ours(text)[:, -1:].argmax(dim=-1)], dim=1)
        return [text[0, 32:].tolist()]

    expected = peer(prompts[:1], arguments.count)[0]

    def checked(run: Callable[[int], list[list[int]]]) -> Timed:
        run(2)  # the prompt, and one more token

        def generated() -> dict[str, object]:
            same = run(arguments.count)[0] == expected
            if device.type == "cpu" and not same:  # on GPUs close logits may differ
                raise ToolkitError("generated another text than transformers")
            return {"as transformers": "yes" if same else "no"}

        return generated

    contenders = [
        Contender("transformers.generate", checked, (partial(peer, prompts[:1]),)),
        Contender("training.generate", checked, (partial(cached, prompts[:1]),), bar=1.1),
        Contender("ours without a cache", checked, (uncached,)),
    ]
    yield from compare("generating", contenders, arguments.rounds, arguments.count, "tokens", here=True)
    batch = [
        Contender("transformers.generate, 8 prompts", checked, (partial(peer, prompts),)),
        Contender("training.generate, 8 prompts", checked, (partial(cached, prompts),)),
    ]
    yield from compare("generating", batch, arguments.rounds, 8 * arguments.count, "tokens", here=True)


CASES: dict[str, Case] = {
    "data": (data, {"count": 8_000_000, "rounds": 3}),
    "bytes": (
        ledger.measure,
        {"size": "345m", "micro-batch": 16, "dropout": 0.0, "tensor": 1, "kernels": "on", "json": False},
    ),
    "step": (step.measure, {"size": None, "rounds": 5}),
    "host": (step.host, {"count": 30}),
    "checkpoint": (checkpoint.measure, {"size": "124m", "rounds": 3, "folder": None}),
    "convert": (convert.measure, {"size": "345m", "rounds": 3, "folder": None}),
    "generate": (generate, {"size": "124m", "count": 128, "rounds": 5}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return harness.main("training", __doc__, CASES, argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
