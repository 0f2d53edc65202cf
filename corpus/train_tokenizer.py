"""Train a byte-level BPE vocabulary on the finished documents, in place of GPT-2's.

    python -m corpus.train_tokenizer --input dedup/*.jsonl.zst --output-dir tokenizer --vocab-size 32000
    python -m corpus.train_tokenizer --input dedup/*.jsonl.zst --output-dir tokenizer --vocab-size 8000 --share 0.1

Writes encoder.json and vocab.bpe as GPT-2's: 256 bytes, the results of the merges, `<|endoftext|>` last; --vocab-size
counts all of them. --share takes the documents whose hashed id is small, in whatever shards they lie. Neither their
order nor the worker count changes a byte; memory follows the number of different words.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
from pydantic import ValidationError

from common import cli
from common.config import step_settings
from common.errors import InputError
from common.files import BadLines, check_outputs, expand_inputs, output_files, read_shards, short_hash
from common.progress import Meter
from common.settings import TrainTokenizerSettings
from common.stats import Stats
from common.tokenizer import END_OF_TEXT, VocabularyFiles

_MIN_COUNT = 2  # a pair that occurs once is no pattern


def _texts(inputs: Sequence[Path], share: float, stats: Stats, bad: BadLines) -> Iterator[str]:
    with Meter("train_tokenizer", "documents") as meter:
        for document in stats.counted(read_shards(inputs, bad)):
            if int(short_hash(document["id"]), 16) < share * 2**64:
                stats.keep(document)
                yield document["text"]
            else:
                stats.reasons["share"] += 1
            meter.advance()


def train_tokenizer(
    inputs: Sequence[Path], files: VocabularyFiles, settings: TrainTokenizerSettings, max_bad_share: float = 0.001
) -> Stats:
    """Write both files, or none. As many threads as RAYON_NUM_THREADS says, or there are cores.

    Raises InputError for unreadable input, and for text too small for that many entries.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    stats, bad = Stats("train_tokenizer"), BadLines(max_bad_share)
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=settings.vocab_size - 1,  # end-of-text comes last, and is no merge
        min_frequency=_MIN_COUNT,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(_texts(inputs, settings.share, stats, bad), trainer)
    bad.check()
    model = orjson.loads(trained.to_str())["model"]
    ids = {**model["vocab"], END_OF_TEXT: len(model["vocab"])}
    if len(ids) < settings.vocab_size:
        raise InputError(
            f"{', '.join(map(str, inputs))}: {stats.documents_out} documents give {len(ids)} entries, not "
            f"{settings.vocab_size}; lower train_tokenizer.vocab_size, raise train_tokenizer.share, or give more text"
        )
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in model["merges"]), ""]
    with output_files([files.encoder_json, files.vocab_bpe]) as (encoder_json, vocab_bpe):
        encoder_json.append(orjson.dumps(ids))
        vocab_bpe.append("\n".join(lines).encode())
    stats.extra.update(bad_lines=bad.bad, vocab_size=len(ids))
    return stats


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.train_tokenizer", __doc__)
    parser.add_argument(
        "--input", type=cli.shards, nargs="+", required=True, metavar="FILE", help="shards of documents"
    )
    parser.add_argument(
        "--output-dir", type=cli.output_folder, required=True, metavar="DIR", help="for encoder.json and vocab.bpe"
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="entries, end-of-text included")
    parser.add_argument("--share", type=float, metavar="X", help="part of the documents to train on (default 1)")
    parser.add_argument("--stats", type=cli.output_file, metavar="FILE", help="what was counted, as JSON")
    parser.add_argument("--workers", type=cli.positive_int, default=1, metavar="N", help="threads (default 1)")
    parser.add_argument("--config", type=cli.input_path, metavar="FILE", help="read the section `train_tokenizer`")
    arguments = parser.parse_args(argv)
    settings = step_settings(arguments.config)
    given = {"vocab_size": arguments.vocab_size, "share": arguments.share}
    wanted = {key: value for key, value in given.items() if value is not None}
    try:
        rules = TrainTokenizerSettings(**{**settings.train_tokenizer.model_dump(), **wanted})
    except ValidationError as errors:
        parser.error(errors.errors()[0]["msg"].removeprefix("Value error, "))
    if not rules.vocab_size:
        parser.error("--vocab-size, or a --config with train_tokenizer.vocab_size")
    os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)  # the library takes no other word for it
    files = VocabularyFiles(arguments.output_dir / "encoder.json", arguments.output_dir / "vocab.bpe")
    inputs = expand_inputs(arguments.input, "shards")
    check_outputs([files.encoder_json, files.vocab_bpe, arguments.stats], inputs)
    stats = train_tokenizer(inputs, files, rules, settings.max_bad_share)
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
