"""Encode documents with GPT-2's byte-level BPE into a Megatron dataset, dropping the ones under 128 tokens.

    python -m corpus.tokenize --input dedup/0000.jsonl.zst --output-prefix tokens/0000
    python -m corpus.tokenize --input dedup/*.jsonl.zst --output-prefix tokens/all --min-tokens 64 --workers 4

`--output-prefix P` writes P_text_document.bin, .idx and .json. `<|endoftext|>` closes each document and is not
counted in its length. The order of the input is kept; the worker count changes no byte.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common import cli
from common.errors import EmptyResultError
from common.files import BadLines, Document, expand_inputs, read_shards, reject_writer
from common.progress import Meter
from common.settings import TokenizeSettings
from common.stats import Stats
from common.tokenizer import Lengths, Tokenizer, vocabulary_files
from common.workers import threaded_map
from corpus.index import IndexWriter, Meta, token_dtype

_BATCH = 1 << 20  # characters encoded at once: some ten milliseconds of work


@dataclass(frozen=True)
class Encoded:
    """What became of a batch of documents."""

    tokens: npt.NDArray[Any]
    """Ids of the kept ones laid end to end, each with its end-of-text; of the index's dtype."""
    lengths: Lengths
    """Tokens of each."""
    short: list[Document]
    """The dropped ones, without their texts."""


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Lists of documents of about a megabyte; a longer document may end one."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document["text"])
        if characters >= _BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode_documents(tokenizer: Tokenizer, settings: TokenizeSettings, documents: list[Document]) -> Encoded:
    """Encode a batch, and set aside the documents under `min_tokens`."""
    ids, lengths = tokenizer.encode_batch([document["text"] for document in documents])
    kept = lengths >= settings.min_tokens
    short = [
        {**{key: value for key, value in document.items() if key != "text"}, "tokens": int(length), "reason": "short"}
        for document, length, keep in zip(documents, lengths, kept, strict=True)
        if not keep
    ]
    tokens = ids.astype(token_dtype(tokenizer.vocab_size))
    if short:
        tokens, lengths = tokens[np.repeat(kept, lengths)], lengths[kept]
    if settings.append_eod:
        tokens, lengths = np.insert(tokens, np.cumsum(lengths), tokenizer.end_of_text), lengths + 1
    return Encoded(tokens, lengths, short)


def tokenize(
    inputs: Sequence[Path],
    output_prefix: Path,
    settings: TokenizeSettings,
    rejects: Path | None = None,
    workers: int = 1,
    max_bad_share: float = 0.001,
    allow_empty: bool = False,
) -> Stats:
    """Encode shards into `<output_prefix>_text_document`, in order.

    Raises InputError for unreadable input, EmptyResultError when nothing is left (unless `allow_empty`).
    """
    stats, bad = Stats("tokenize"), BadLines(max_bad_share)
    tokenizer = Tokenizer(vocabulary_files(settings.encoder_json, settings.vocab_bpe))
    prefix = output_prefix.with_name(output_prefix.name + "_text_document")
    meta = Meta(vocab_size=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text)
    documents = stats.counted(read_shards(inputs, bad))
    encoded = threaded_map(partial(encode_documents, tokenizer, settings), batches(documents), workers - 1)
    with IndexWriter(prefix, token_dtype(meta.vocab_size), meta) as index, reject_writer(rejects, "tokenize") as reject:
        with Meter("tokenize", "tokens") as meter:
            for batch in encoded:
                index.add_documents(batch.tokens, batch.lengths)
                for document in batch.short:
                    stats.reasons["short"] += 1
                    reject(document)
                meter.advance(len(batch.tokens), note=f"{index.documents:,} documents")
        bad.check()
        stats.documents_out, stats.bytes_out = index.documents, index.tokens * index.dtype.itemsize
        stats.extra.update(bad_lines=bad.bad, tokens=index.tokens)
        if not stats.documents_out and not allow_empty:
            raise EmptyResultError(
                f"{', '.join(map(str, inputs))}: none of {stats.documents_in} documents has {settings.min_tokens} "
                "tokens or more; lower tokenize.min_tokens or give more text"
            )
    return stats


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.tokenize", __doc__)
    parser.add_argument(
        "--input", type=cli.shards, nargs="+", required=True, metavar="FILE", help="shards of documents"
    )
    parser.add_argument(
        "--output-prefix",
        type=cli.output_prefix("_text_document"),
        required=True,
        metavar="P",
        help="writes P_text_document.*",
    )
    cli.add_key_flag(parser, "--min-tokens", "tokenize.min_tokens", type=int, metavar="N")
    cli.add_step_options(parser, "tokenize")
    arguments = parser.parse_args(argv)
    settings = cli.read_settings(arguments)
    stats = tokenize(
        expand_inputs(arguments.input, "shards"),
        arguments.output_prefix,
        settings.tokenize,
        rejects=arguments.rejects,
        workers=arguments.workers,
        max_bad_share=settings.max_bad_share,
        allow_empty=arguments.allow_empty,
    )
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
