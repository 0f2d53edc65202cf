"""Encode documents with GPT-2's byte-level BPE into a Megatron dataset; drop short ones.

    python -m corpus.tokenize --input dedup/0000.jsonl.zst --output-prefix tokens/0000
    python -m corpus.tokenize --input dedup --output-prefix tokens/all tokenize.min_tokens=64

`--output-prefix P` writes P_text_document.bin, .idx, .json and .docs (where each document comes
from). `<|endoftext|>` closes each document; min_tokens does not count it. Documents keep their
order, and the worker count changes no byte.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from common import cli
from common.files import Document, expand_inputs
from common.settings import TokenizeSettings
from common.stats import Stats, histogram
from common.tokenizer import Lengths, Tokenizer
from common.vocabulary import vocabulary_files
from common.workers import threaded_map
from corpus.index import IndexWriter, Meta, token_dtype
from corpus.runner import ShardStep, StepOptions, grouped, step_options

_BATCH = 1 << 20  # characters encoded at once: some ten milliseconds of work


class Encoded(NamedTuple):
    """A batch of documents, encoded."""

    tokens: npt.NDArray[Any]
    """Ids of the kept documents, end to end, each with its end-of-text, in the index's dtype."""
    lengths: Lengths
    """Tokens per document."""
    kept: list[Document]
    """The documents, without their texts."""
    short: list[Document]
    """Those that are dropped, without their texts."""


def encode_documents(tokenizer: Tokenizer, settings: TokenizeSettings, documents: list[Document]) -> Encoded:
    """Encode a batch; documents under `min_tokens` are returned apart."""
    ids, lengths = tokenizer.encode_batch([document["text"] for document in documents])
    long_enough = lengths >= settings.min_tokens
    kept, short = list[Document](), list[Document]()
    for document, length, enough in zip(documents, lengths.tolist(), long_enough.tolist(), strict=True):
        rest = {key: value for key, value in document.items() if key != "text"}
        if enough:
            kept.append(rest)
        else:
            short.append({**rest, "tokens": length})
    tokens = ids.astype(token_dtype(tokenizer.vocab_size))
    if short:
        tokens, lengths = tokens[np.repeat(long_enough, lengths)], lengths[long_enough]
    if settings.append_eod:
        tokens, lengths = np.insert(tokens, np.cumsum(lengths), tokenizer.end_of_text), lengths + 1
    return Encoded(tokens, lengths, kept, short)


def tokenize(
    inputs: Sequence[Path], output_prefix: Path, settings: TokenizeSettings, **options: Unpack[StepOptions]
) -> Stats:
    """Encode shards into `<output_prefix>_text_document`, in order.

    Raises InputError for unreadable input, EmptyResultError if nothing is left (unless
    `allow_empty`).
    """
    step = ShardStep("tokenize", inputs, **options, cure="lower tokenize.min_tokens or give more text")
    tokenizer = Tokenizer(vocabulary_files(settings.encoder_json, settings.vocab_bpe))
    prefix = output_prefix.with_name(output_prefix.name + "_text_document")
    meta = Meta(tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.vocabulary.hash)
    # threads: the encoder releases the GIL
    batches = grouped(step.documents(), lambda document: len(document["text"]), _BATCH)
    encoded = threaded_map(partial(encode_documents, tokenizer, settings), batches, step.workers - 1)
    writer = IndexWriter(prefix, token_dtype(meta.vocab_size), meta, table=True)
    bits = Counter[int]()
    with writer as index, step.results() as results:
        assert index.table is not None
        for batch in encoded:
            index.add_documents(batch.tokens, batch.lengths)
            index.table.add(batch.kept, output_prefix.name)
            for document in batch.short:
                results.drop(document, "short")
            for document, length in zip(batch.kept, batch.lengths.tolist(), strict=True):
                step.stats.count_kept_by(document, length * batch.tokens.itemsize)
                bits[length.bit_length()] += 1
            step.stats.documents_out += len(batch.lengths)
            step.stats.bytes_out += batch.tokens.nbytes
            results.meter.advance(len(batch.lengths) + len(batch.short), note=f"{index.tokens:,} tokens")
    step.stats.extra |= {"tokens": index.tokens, "token_lengths": histogram(bits)}
    return step.stats


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.tokenize", __doc__)
    cli.add_input(parser)
    parser.add_argument(
        "--output-prefix",
        type=cli.output_prefix("_text_document"),
        required=True,
        metavar="P",
        help="writes P_text_document.*",
    )
    cli.add_step_options(parser, "tokenize")
    arguments = parser.parse_args(argv)
    settings = cli.read_settings(arguments)
    inputs, options = expand_inputs(arguments.input, "shards"), step_options(arguments, settings)
    tokenize(inputs, arguments.output_prefix, settings.tokenize, **options).finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
