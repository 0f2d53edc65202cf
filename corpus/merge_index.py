"""Concatenate Megatron datasets: shards in the order given, every document kept.

    python -m corpus.merge_index --inputs tokens/0000_text_document tokens/0001_text_document --output-prefix corpus
    python -m corpus.merge_index --inputs tokens/*.idx --output-prefix dataset/corpus_text_document

A PREFIX is the full name without `.bin` or `.idx` (a trailing `.idx` is taken off, so that a glob works).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from common import cli
from common.errors import EmptyResultError, InputError
from common.progress import Meter
from common.stats import Stats
from corpus.index import IndexedDataset, IndexWriter, read_meta, suffixed


def merge_index(inputs: Sequence[Path], output_prefix: Path) -> Stats:
    """Write one dataset with the documents of all inputs.

    Raises InputError for a damaged input, or one of another dtype or vocabulary than the first, EmptyResultError when
    there is no document at all.
    """
    stats = Stats("merge_index")
    first = IndexedDataset(inputs[0])
    meta = read_meta(inputs[0])
    if output_prefix in inputs:
        raise InputError(f"{output_prefix}: is an input and the output; choose another --output-prefix")
    with IndexWriter(output_prefix, first.dtype, meta) as index, Meter("merge_index", "shards", len(inputs)) as meter:
        for prefix in inputs:
            if read_meta(prefix) != meta:
                raise InputError(
                    f"{suffixed(prefix, '.json')}: another vocabulary than {inputs[0]}; "
                    "tokenize all shards with one vocabulary"
                )
            shard = IndexedDataset(prefix)
            index.add_index(shard)
            stats.documents_in += shard.n_documents
            stats.bytes_in += len(shard.tokens) * shard.dtype.itemsize
            meter.advance()
        stats.documents_out, stats.bytes_out = index.documents, index.tokens * index.dtype.itemsize
        stats.extra["tokens"] = index.tokens
        if not stats.documents_out:
            raise EmptyResultError.no_documents(inputs)
    return stats


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.merge_index", __doc__)
    parser.add_argument("--inputs", nargs="+", required=True, type=Path, metavar="PREFIX", help="datasets to join")
    parser.add_argument("--output-prefix", type=Path, required=True, metavar="P", help="writes P.bin, P.idx, P.json")
    parser.add_argument("--stats", type=Path, metavar="FILE", help="what was counted, as JSON")
    arguments = parser.parse_args(argv)
    inputs = [path.with_suffix("") if path.suffix == ".idx" else path for path in arguments.inputs]
    stats = merge_index(inputs, arguments.output_prefix)
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
