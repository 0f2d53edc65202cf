"""Write shards as Parquet or gzipped JSON lines, for Hugging Face datasets, pandas, DuckDB, Spark.

    python -m corpus.export --input results/demo/dedup --output-dir parquet
    python -m corpus.export --input clean/*.jsonl.zst --output-dir json --format jsonl --workers 8

Each shard becomes one file of its name, 0000.parquet or 0000.jsonl.gz, with the columns id, url, text and meta and the
documents in their order. `datasets.load_dataset("parquet", data_files="parquet/*.parquet")` reads them; for JSON lines
it is "json". Each file appears complete or not at all; the worker count changes no byte. Parquet needs pyarrow:
`pip install 'urls-to-gpt2[parquet]'`.
"""

import gzip
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Literal

import orjson

from common import cli
from common.errors import EmptyResultError, InputError
from common.files import (
    BadLines,
    Document,
    check_outputs,
    expand_inputs,
    output_files,
    read_documents,
    require_distinct_stems,
    shard_stem,
)
from common.progress import Meter
from common.stats import Stats
from common.workers import Workers
from corpus.runner import grouped

Format = Literal["parquet", "jsonl"]
Row = tuple[str, str, str, str]

SUFFIXES: dict[Format, str] = {"parquet": ".parquet", "jsonl": ".jsonl.gz"}
COLUMNS = ("id", "url", "text", "meta")
_ROW_GROUP = 16 << 20  # characters per row group; the memory of an export is a few times that


def row_of(document: Document) -> Row:
    """A document's values for COLUMNS, all of them strings.

    None is null: `datasets` cannot read JSON lines whose first values of a column are null. A document without a URL
    has "". `meta` is a JSON object as text; it has the document's own `meta`, and every key that is no column.
    """
    own = document.get("meta")
    meta = dict(own) if isinstance(own, dict) else {} if own is None else {"meta": own}
    meta |= {key: value for key, value in document.items() if key not in COLUMNS}
    url = document.get("url")
    return document["id"], url if isinstance(url, str) else "", document["text"], orjson.dumps(meta).decode()


def _write_jsonl(rows: Iterator[Row], file: IO[bytes]) -> None:
    with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0) as lines:  # no name, no time
        for row in rows:
            lines.write(orjson.dumps(dict(zip(COLUMNS, row, strict=True)), option=orjson.OPT_APPEND_NEWLINE))


def _write_parquet(rows: Iterator[Row], file: IO[bytes]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([pa.field(name, pa.string(), nullable=False) for name in COLUMNS])
    options = {"compression": "zstd", "compression_level": 3, "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(file, schema, **options) as writer:
        for group in grouped(rows, lambda row: sum(map(len, row)), _ROW_GROUP):
            writer.write_table(pa.table(list(zip(*group, strict=True)), schema=schema), row_group_size=len(group))


def export_shard(output_dir: Path, format: Format, max_bad_share: float, shard: Path) -> Stats:
    """Write one shard to a file of its name in `output_dir`; returns the number of documents. Raises InputError."""
    stats, bad = Stats("export"), BadLines(max_bad_share)

    def rows() -> Iterator[Row]:
        for document in stats.counted(read_documents(shard, bad)):
            stats.keep(document)
            yield row_of(document)

    with output_files([_output(output_dir, format, shard)]) as (output,), output.open() as file:
        (_write_parquet if format == "parquet" else _write_jsonl)(rows(), file)
        bad.check()
    stats.extra["bad_lines"] = bad.bad
    return stats


def _output(output_dir: Path, format: Format, shard: Path) -> Path:
    return output_dir / f"{shard_stem(shard)}{SUFFIXES[format]}"


def export(
    shards: Sequence[Path], output_dir: Path, format: Format = "parquet", workers: int = 1, max_bad_share: float = 0.001
) -> Stats:
    """Export shards in `workers` processes; finished files stay when a later one fails.

    Raises InputError for unreadable input, names that collide, or Parquet without pyarrow, and EmptyResultError if
    there is no document in any shard.
    """
    if format == "parquet" and not find_spec("pyarrow"):
        raise InputError("--format parquet: needs pyarrow; pip install 'urls-to-gpt2[parquet]', or use --format jsonl")
    for shard in shards:
        if not shard.is_file():
            raise InputError(f"{shard}: is not a regular file, so that its output has no name; write it to a file")
    require_distinct_stems(shards)
    check_outputs([_output(output_dir, format, shard) for shard in shards], shards)
    stats = Stats("export", extra={"bad_lines": 0})
    with Workers(min(workers, len(shards))) as pool:
        pool.start()
        function = partial(export_shard, output_dir, format, max_bad_share)
        with Meter("export", "shards", len(shards)) as meter:
            for future in [pool.submit(function, shard) for shard in shards]:
                done = future.result()
                stats.add(done)
                stats.extra["bad_lines"] += done.extra["bad_lines"]
                meter.advance(1, done.bytes_out)
    if not stats.documents_out:
        raise EmptyResultError(f"{shards[0]}{' …' if len(shards) > 1 else ''}: no documents inside")
    return stats


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("corpus.export", __doc__)
    cli.add_input(parser)
    parser.add_argument("--output-dir", type=cli.output_folder, required=True, metavar="DIR", help="output folder")
    parser.add_argument("--format", choices=list(SUFFIXES), default="parquet", help="of the files (default parquet)")
    cli.add_stats(parser)
    cli.add_workers(parser)
    cli.add_settings(parser)
    arguments = parser.parse_args(argv)
    settings = cli.read_settings(arguments)
    shards = expand_inputs(arguments.input, "shards")
    stats = export(shards, arguments.output_dir, arguments.format, arguments.workers, settings.max_bad_share)
    stats.finish(arguments.stats)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
