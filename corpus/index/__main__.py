"""Inspect a Megatron dataset: PREFIX.bin holds the tokens, PREFIX.idx says where documents begin.

    python -m corpus.index inspect results/demo/dataset/corpus_text_document
    python -m corpus.index inspect results/demo/dataset/corpus_text_document --verify

PREFIX is the full name without `.bin` or `.idx`. Both commands check the index; `--verify` also
reads every token. The first fault is reported in one line, with exit code 2.
"""

import sys
from collections.abc import Sequence

from common import cli
from common.console import text_table
from corpus.index.dataset import IndexedDataset
from corpus.index.layout import suffixed

_SAMPLE = 1000  # documents whose last token is checked: each costs a page of PREFIX.bin


def inspect(dataset: IndexedDataset) -> str:
    """Describe a dataset, one line per fact."""
    lengths, meta = dataset.lengths, dataset.meta
    sizes = {suffix: suffixed(dataset.prefix, suffix).stat().st_size for suffix in (".bin", ".idx")}
    rows = {
        "documents": f"{dataset.n_documents:,}",
        "sequences": f"{len(dataset):,}",
        "tokens": f"{len(dataset.tokens):,}",
        "dtype": dataset.dtype.name,
        "bytes": f"{sizes['.bin']:,} in .bin, {sizes['.idx']:,} in .idx",
        "shortest": f"{lengths.min() if len(lengths) else 0:,} tokens",
        "longest": f"{lengths.max() if len(lengths) else 0:,} tokens",
        "vocabulary": f"{meta.vocab_size:,}, end of text {meta.end_of_text}" if meta else "unknown (no .json)",
        "end of text": _closed(dataset, meta.end_of_text) if meta else "unknown (no .json)",
        "checksums": "yes" if meta and meta.checksum else "none",
    }
    return text_table(rows.items())


def _closed(dataset: IndexedDataset, end_of_text: int) -> str:
    """The share of documents that end with end-of-text, of up to 1,000 evenly spaced ones."""
    step = max(1, dataset.n_documents // _SAMPLE)
    last = [tokens[-1] for n in range(0, dataset.n_documents, step) if len(tokens := dataset.document(n))]
    return f"closes {sum(token == end_of_text for token in last):,} of {len(last):,} documents checked"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.index", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("inspect", help="print what a dataset holds")
    command.add_argument("prefix", type=cli.input_path, metavar="PREFIX")
    command.add_argument("--verify", action="store_true", help="read every token")
    arguments = parser.parse_args(argv)
    dataset = IndexedDataset(arguments.prefix)
    print(inspect(dataset))
    if arguments.verify:
        dataset.verify()
        print("verified")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
