"""Train a byte-level BPE vocabulary on the finished documents, in place of GPT-2's.

    python -m corpus.train_tokenizer --input dedup/*.jsonl.zst --output-dir tokenizer \\
        train_tokenizer.vocab_size=32000

Writes encoder.json and vocab.bpe in GPT-2's format: 256 bytes, the merges, `<|endoftext|>` last;
`vocab_size` counts all of them. `train_tokenizer.share` takes the documents with the smallest
hashed ids, independent of shards. Neither the order of the documents nor the worker count changes a
byte; memory grows with the number of distinct words.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson

from common import cli
from common.errors import InputError
from common.files import check_outputs, expand_inputs, output_files, short_hash
from common.settings import TrainTokenizerSettings
from common.stats import Stats
from common.vocabulary import END_OF_TEXT, VocabularyFiles
from corpus.runner import Drop, Results, ShardStep

_MIN_COUNT = 2  # occurrences of a pair before it is merged


def _texts(step: ShardStep, results: Results, share: float) -> Iterator[str]:
    """The texts of a share of the documents."""
    for document in step.documents():
        chosen = int(short_hash(document["id"]), 16) < share * 2**64
        results.record(document if chosen else Drop(document, "share"))
        if chosen:
            yield document["text"]
    results.meter.note("all read, merging pairs")


def train_tokenizer(
    inputs: Sequence[Path], files: VocabularyFiles, settings: TrainTokenizerSettings, max_bad_share: float = 0.001
) -> Stats:
    """Write both files, or neither. Uses RAYON_NUM_THREADS threads, by default one per core.

    Raises InputError for unreadable input, and for too little text for that many entries.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    step = ShardStep("train_tokenizer", inputs, max_bad_share=max_bad_share, allow_empty=True)
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=settings.vocab_size - 1,  # end-of-text comes last, and is no merge
        min_frequency=_MIN_COUNT,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    with step.results() as results, _default_signals():
        trained.train_from_iterator(_texts(step, results, settings.share), trainer)
    model = orjson.loads(trained.to_str())["model"]
    ids = {**model["vocab"], END_OF_TEXT: len(model["vocab"])}
    if len(ids) < settings.vocab_size:
        raise InputError(
            f"{', '.join(map(str, inputs))}: {step.stats.documents_out} documents give {len(ids)} vocabulary "
            f"entries, not {settings.vocab_size}; lower train_tokenizer.vocab_size, raise train_tokenizer.share, or "
            "give more text"
        )
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in model["merges"]), ""]
    with output_files([files.encoder_json, files.vocab_bpe]) as (encoder_json, vocab_bpe):
        encoder_json.append(orjson.dumps(ids))
        vocab_bpe.append("\n".join(lines).encode())
    step.stats.extra["vocab_size"] = len(ids)
    return step.stats


@contextmanager
def _default_signals() -> Iterator[None]:
    """Let a signal end the process immediately: the library blocks the main thread for minutes."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.train_tokenizer", __doc__)
    cli.add_input(parser)
    parser.add_argument(
        "--output-dir", type=cli.output_folder, required=True, metavar="DIR", help="for encoder.json and vocab.bpe"
    )
    cli.add_stats(parser)
    cli.add_workers(parser)
    cli.add_settings(parser, "train_tokenizer")
    arguments = parser.parse_args(argv)
    settings = cli.read_settings(arguments)
    if not settings.train_tokenizer.vocab_size:
        parser.error("train_tokenizer.vocab_size is 0; give train_tokenizer.vocab_size=N, or a --config with it")
    os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)  # the library's only switch
    files = VocabularyFiles(arguments.output_dir / "encoder.json", arguments.output_dir / "vocab.bpe")
    inputs = expand_inputs(arguments.input, "shards")
    check_outputs([files.encoder_json, files.vocab_bpe, arguments.stats], inputs)
    stats = train_tokenizer(inputs, files, settings.train_tokenizer, settings.max_bad_share)
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
