"""Encoding: our whole step against the bare encoders of tokenizers, tiktoken and gigatoken, on the same documents.

The bare rows have the texts in memory and a loaded vocabulary, and drop the ids. corpus.tokenize loads its vocabulary,
reads, decompresses, parses, encodes, filters and writes. Each row runs in its own process, on one core except for the
last; ratios are of CPU time, which other load disturbs least. The second table shows the parts of our step. Documents
are cut as for `clean`. Without a folder they repeat, and gigatoken caches words, so give real texts.
"""

import argparse
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from benchmarks.clean import documents, packaged_texts, read_texts
from benchmarks.machine import table
from common.cli import input_path, positive_int
from common.files import document_writer, read_blocks, read_documents, short_hash
from common.settings import TokenizeSettings
from common.stats import Stats
from common.tokenizer import END_OF_TEXT, Ids, Lengths, Tokenizer, vocabulary_files


class Run(NamedTuple):
    """Durations of one process, in seconds."""

    cpu: float
    wall: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--texts", type=input_path, nargs="+", metavar="DIR", help="folders of real texts")
    parser.add_argument("--count", type=positive_int, default=2000, metavar="N", help="documents (default 2,000)")
    parser.add_argument("--rounds", type=positive_int, default=1, metavar="N", help="rounds per row (default 1)")


def _run(work: Callable[[], object]) -> Run:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Run(time.process_time() - cpu, time.perf_counter() - wall)


def _all(items: Iterable[object]) -> None:
    deque(items, maxlen=0)


def bare(name: str, source: Path) -> Run:
    """Encode every text with one call of a library."""
    files = vocabulary_files()
    encode: Callable[[str], Any]
    if name.startswith("tokenizers"):
        from tokenizers import ByteLevelBPETokenizer

        encode = ByteLevelBPETokenizer(str(files.encoder_json), str(files.vocab_bpe)).encode
    elif name.startswith("tiktoken"):
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        from tiktoken_ext.openai_public import r50k_pat_str

        os.environ["TIKTOKEN_CACHE_DIR"] = ""  # it would copy the files to /tmp
        ranks = data_gym_to_mergeable_bpe_ranks(str(files.vocab_bpe), str(files.encoder_json))
        encoding = tiktoken.Encoding(
            "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 50256}
        )
        encode = encoding.encode_ordinary if name.endswith("encode_ordinary") else encoding.encode_to_numpy
    else:
        import gigatoken
        from tokenizers import ByteLevelBPETokenizer

        theirs = ByteLevelBPETokenizer(str(files.encoder_json), str(files.vocab_bpe))
        encode = gigatoken.Tokenizer(theirs._tokenizer).encode
    texts = [document["text"].replace(END_OF_TEXT, "") for document in read_documents(source)]
    return _run(lambda: _all(map(encode, texts)))


def ours(workers: int, source: Path) -> Run:
    """`corpus.tokenize`."""
    from corpus.tokenize import tokenize

    tokenize([source.with_name("one.jsonl.zst")], source.with_name("one"), TokenizeSettings(), allow_empty=True)
    return _run(lambda: tokenize([source], source.with_name("out"), TokenizeSettings(), workers=workers))


class _Timed(Tokenizer):
    """A tokenizer that measures the seconds of its encoder."""

    seconds = 0.0

    def encode_batch(self, texts: Any) -> tuple[Ids, Lengths]:
        started = time.process_time()
        result = super().encode_batch(texts)
        self.seconds += time.process_time() - started
        return result


def parts(source: Path) -> dict[str, float]:
    """CPU seconds of each part of the step, in order."""
    from corpus.index import IndexWriter
    from corpus.tokenize import Encoded, batches, encode_documents

    def write() -> None:
        with IndexWriter(source.with_name("parts"), np.uint16) as index:
            for batch in encoded:
                index.add_documents(batch.tokens, batch.lengths)

    read = _run(lambda: _all(read_blocks(source))).cpu
    parsed = _run(lambda: _all(read_documents(source))).cpu
    counted = _run(lambda: _all(batches(Stats("").counted(read_documents(source))))).cpu
    Tokenizer().encode("")  # imports
    tokenizer = _Timed()
    load = _run(lambda: tokenizer.encode("")).cpu
    tokenizer.seconds = 0.0
    encoded: list[Encoded] = []
    texts = list(batches(read_documents(source)))
    filtered = _run(
        lambda: encoded.extend(encode_documents(tokenizer, TokenizeSettings(), batch) for batch in texts)
    ).cpu
    return {
        "load the vocabulary": load,
        "read and decompress": read,
        "split lines, JSON": parsed - read,
        "statistics, batches": counted - parsed,
        "encode": tokenizer.seconds,
        "filter, end-of-text, uint16": filtered - tokenizer.seconds,
        "write": _run(write).cpu,
    }


def _alone(cores: int, function: Callable[..., Any], *arguments: object) -> Any:
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=_keep_to, initargs=(cores,)
    ) as pool:
        return pool.submit(function, *arguments).result()


def _keep_to(cores: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def measure(arguments: argparse.Namespace) -> str:
    """Megabytes of text per second of each encoder, and the parts of our step."""
    found = chain.from_iterable(map(read_texts, arguments.texts)) if arguments.texts else packaged_texts()
    rows: dict[str, list[Run]] = {}
    with TemporaryDirectory() as folder:
        source = Path(folder, "in.jsonl.zst")
        size = 0
        with document_writer(source) as write, document_writer(source.with_name("one.jsonl.zst")) as write_one:
            for number, text in enumerate(documents(found, arguments.count)):
                write({"id": short_hash(f"{number}"), "text": text})
                size += len(text.encode())
                if not number:
                    write_one({"id": "0", "text": text})
        for _ in range(arguments.rounds):
            for name in (
                "tokenizers, encode",
                "tiktoken, encode_ordinary",
                "tiktoken, encode_to_numpy",
                "gigatoken, encode",
            ):
                rows.setdefault(name, []).append(_alone(1, bare, name, source))
            for workers in (1, 2):
                name = f"corpus.tokenize, {workers} worker{'s' * (workers > 1)}, end to end"
                rows.setdefault(name, []).append(_alone(workers, ours, workers, source))
        seconds = _alone(1, parts, source)
    slow, fast = rows["tokenizers, encode"], rows["tiktoken, encode_to_numpy"]
    total = sum(seconds.values())
    return "\n\n".join(
        [
            f"{arguments.count:,} documents at most, {size / 1e6:.1f} MB of text",
            table(
                [
                    {
                        "encoding": name,
                        "MB/s of CPU time": f"{size / 1e6 / median(run.cpu for run in runs):.1f}",
                        "MB/s by the clock": f"{size / 1e6 / median(run.wall for run in runs):.1f}",
                        "to tiktoken's fastest": _ratio(fast, runs),
                        "to tokenizers": _ratio(slow, runs),
                    }
                    for name, runs in rows.items()
                ]
            ),
            table(
                [
                    {"part of corpus.tokenize": name, "CPU ms": f"{1000 * value:.0f}", "share": f"{value / total:.0%}"}
                    for name, value in seconds.items()
                ]
            ),
        ]
    )


def _ratio(peer: list[Run], runs: list[Run]) -> str:
    return f"{median(theirs.cpu / run.cpu for theirs, run in zip(peer, runs, strict=True)):.2f}"
