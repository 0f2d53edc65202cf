"""Readers of Parquet and Arrow files, which need pyarrow: each row is read as the JSON object of its columns.

A batch of rows is in memory at a time. Dates and times become text (ISO 8601, down to microseconds), decimals text,
bytes base64; lists and structs stay; NaN and infinity, which JSON lacks, become null.
"""

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from common.errors import InputError
from common.files import BadLines, Document
from common.settings import SourceSettings
from corpus.sources.records import read_record

_ROWS = 256  # converted at a time
_BUFFER = 1 << 20  # bytes of a column read at a time
_END = b"\xff\xff\xff\xff\0\0\0\0"  # the last message of a stream


def read_parquet(path: Path, source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    """The rows of a Parquet file. Raises InputError for a damaged file and a column that does not fit."""
    yield from _rows(path, _parquet_batches(path, source), source, bad)


def read_arrow(path: Path, source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    """The rows of an Arrow file or stream, such as those of Hugging Face datasets; errors as in `read_parquet`."""
    yield from _rows(path, _arrow_batches(path, source), source, bad)


def _parquet_batches(path: Path, source: SourceSettings) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
        columns = _columns(path, file.schema_arrow, source)
        yield from file.iter_batches(_ROWS, columns=columns, use_threads=False)


def _arrow_batches(path: Path, source: SourceSettings) -> Iterator[Any]:
    import pyarrow as pa

    with path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(max(0, path.stat().st_size - len(_END)))
        if not is_file and file.read() != _END:
            raise InputError(f"{path}: truncated Arrow file; create it again")
    with pa.OSFile(str(path)) as file:
        opened = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        columns = _columns(path, opened.schema, source)
        batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS):
                yield batch.select(columns).slice(start, _ROWS)


def _columns(path: Path, schema: Any, source: SourceSettings) -> list[str]:
    """The columns to read. Raises InputError if the text's is missing, or holds no strings."""
    import pyarrow.types as types

    key = source.text_key
    if key not in schema.names:
        raise InputError(f"{path}: no column {key!r}, but {', '.join(schema.names)}; set text_key")
    kind = schema.field(key).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise InputError(
            f"{path}: column {key!r} holds {kind}, no strings; set text_key to one of {', '.join(schema.names)}"
        )
    return [name for name in schema.names if name == key or name not in source.skip_keys]


def _rows(path: Path, batches: Iterator[Any], source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    try:
        import pyarrow as pa
    except ImportError:
        raise InputError(f"{path}: needs pyarrow to be read; pip install 'urls-to-gpt2[parquet]'") from None
    number = 0
    try:
        for batch in batches:
            for row in _without_nanoseconds(batch).to_pylist():
                number += 1
                yield from read_record(orjson.dumps(row, default=_plain), f"{path}: row {number}", source, bad)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(
            f"{path}: damaged after row {number} ({str(error).splitlines()[0]}); create it again"
        ) from None


def _without_nanoseconds(batch: Any) -> Any:
    """The batch with times in microseconds, which Python has."""
    import pyarrow as pa

    for index, field in enumerate(batch.schema):
        kind = field.type
        if getattr(kind, "unit", "") == "ns":
            zone = {"tz": kind.tz} if pa.types.is_timestamp(kind) else {}
            target = {"timestamp": pa.timestamp, "time64": pa.time64, "duration": pa.duration}[
                str(kind).partition("[")[0]
            ]
            column = batch.column(index).cast(target("us", **zone), safe=False)
            batch = batch.set_column(index, field.name, column)
    return batch


def _plain(value: Any) -> str:
    """What JSON lacks, as text."""
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)
