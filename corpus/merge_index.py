"""Concatenate Megatron datasets in the given order.

    python -m corpus.merge_index --inputs tokens/0000_text_document tokens/0001_text_document \\
        --output-prefix corpus
    python -m corpus.merge_index --inputs tokens --shards 1000 --output-prefix dataset/corpus

A PREFIX is the full name without `.bin` or `.idx` (a trailing `.idx` is removed, so that a glob
works). A folder stands for its datasets sorted by name, or, with `--shards N`, for
0000_text_document to N - 1. A dataset named twice is merged twice. Every shard is verified as it is
read; memory does not grow with shards, documents or tokens.
"""

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from common import cli
from common.errors import EmptyResultError, InputError
from common.files import check_outputs, shard_paths
from common.progress import Meter
from common.stats import Stats, no_documents
from corpus.index import IndexedDataset, IndexWriter, read_meta, suffixed
from corpus.index.documents import DocumentTable
from corpus.index.layout import DOCUMENTS


def merge_index(inputs: Sequence[Path], output_prefix: Path) -> Stats:
    """Write one dataset with the documents of all inputs.

    Raises InputError for a damaged input, and for different dtypes or vocabularies;
    EmptyResultError if there is no document at all.
    """
    stats = Stats("merge_index")
    files = [
        [suffixed(prefix, suffix) for suffix in (".bin", ".idx", ".json", DOCUMENTS)]
        for prefix in (output_prefix, *inputs)
    ]
    check_outputs(files[0], chain.from_iterable(files[1:]))
    first = IndexedDataset(inputs[0])
    table = all(suffixed(prefix, DOCUMENTS).is_file() for prefix in inputs)  # not those of other tools
    with IndexWriter(output_prefix, first.dtype, read_meta(inputs[0]), table) as index:
        with Meter("merge_index", "shards", len(inputs)) as meter:
            for prefix in inputs:
                shard = IndexedDataset(prefix)
                _require_alike(shard, first)
                index.add_index(shard, meter)
                if index.table is not None:
                    index.table.add_table(DocumentTable(prefix))
                stats.documents_in += shard.n_documents
                stats.bytes_in += shard.tokens.nbytes
                meter.advance(note=f"{index.tokens:,} tokens")
        stats.documents_out, stats.bytes_out = index.documents, index.tokens * index.dtype.itemsize
        stats.extra["tokens"] = index.tokens
        if not stats.documents_out:
            raise EmptyResultError(no_documents(inputs, inputs[0].parent.parent))
    return stats


def _require_alike(shard: IndexedDataset, first: IndexedDataset) -> None:
    """Raise InputError if the two differ in dtype or, where both are known, vocabulary."""
    mine, theirs = (meta.vocabulary if meta else "" for meta in (shard.meta, first.meta))
    for suffix, one, other in (
        (".idx", shard.dtype.name, first.dtype.name),
        (".json", shard.meta, first.meta),
        (".json", f"merges {mine or theirs}", f"merges {theirs or mine}"),
    ):
        if one != other:
            raise InputError(
                f"{suffixed(shard.prefix, suffix)}: {one or 'no such file'}, but "
                f"{suffixed(first.prefix, suffix)}: {other or 'no such file'}; "
                "tokenize all shards with one vocabulary"
            )


def expand_prefixes(paths: Sequence[Path], shards: int | None) -> list[Path]:
    """The prefixes that arguments stand for. Raises InputError for a folder without datasets."""
    prefixes: list[Path] = []
    for path in paths:
        if not path.is_dir():
            if shards is not None:
                raise InputError(f"{path}: is not a folder; --shards takes shards out of a folder")
            prefixes.append(path.with_suffix("") if path.suffix == ".idx" else path)
        elif shards is not None:
            prefixes.extend(shard_paths(path, shards, "_text_document"))
        elif indexes := sorted(index for index in path.glob("*.idx") if not index.name.startswith(".")):
            prefixes.extend(index.with_suffix("") for index in indexes)
        else:
            raise InputError(f"{path}: no *.idx in this folder; run corpus.tokenize first")
    return prefixes


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.merge_index", __doc__)
    parser.add_argument(
        "--inputs",
        nargs="+",
        required=True,
        type=cli.input_path,
        metavar="PREFIX",
        help="datasets to join, or folders of them",
    )
    parser.add_argument("--shards", type=cli.positive_int, metavar="N", help="only shards 0000 to N - 1 of a folder")
    parser.add_argument(
        "--output-prefix",
        type=cli.output_prefix(),
        required=True,
        metavar="P",
        help="writes P.bin, P.idx, P.json, P.docs",
    )
    cli.add_stats(parser)
    arguments = parser.parse_args(argv)
    stats = merge_index(expand_prefixes(arguments.inputs, arguments.shards), arguments.output_prefix)
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
