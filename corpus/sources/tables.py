"""Readers of Parquet and Arrow files, which need pyarrow: a row is a JSON object of its columns.

A batch of rows is in memory at a time. Dates and times become text (ISO 8601, down to
microseconds), decimals text, bytes base64; lists and structs stay; NaN and infinity become null.
"""

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from common.errors import InputError
from common.files import BadLines, Document
from common.settings import SourceSettings
from corpus.sources.lines import other_keys, read_record

_ROWS = 256  # converted at a time
_BUFFER = 1 << 20  # bytes of a column read at a time
_CURE = "create the file again, or name the column under skip_keys"
_END = b"\xff\xff\xff\xff\0\0\0\0"  # the last message of a stream


def read_parquet(path: Path, source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    """The rows of a Parquet file. Raises InputError for damage and for an unusable column."""
    yield from _rows(path, _parquet_batches(path, source), source, bad)


def read_arrow(path: Path, source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    """The rows of an Arrow file or stream (Hugging Face datasets); errors as `read_parquet`."""
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
    """The columns to read. Raises InputError for a column twice, and if the text's has no text."""
    key = source.text_key
    if key not in schema.names:
        raise InputError(f"{path}: no column {key!r}, but {other_keys(key, schema.names)}")
    columns = [name for name in schema.names if name == key or name not in source.skip_keys]
    if double := [name for name in columns if columns.count(name) > 1]:
        raise InputError(f"{path}: column {double[0]!r} occurs twice; {_CURE}")
    texts = [field.name for field in schema if _is_text(field.type)]
    if key not in texts:
        others = f"set text_key to one of {', '.join(texts)}"
        cure = others if texts else "write it as string, with pyarrow's column.cast('string')"
        raise InputError(f"{path}: column {key!r} is {schema.field(key).type}, no text; {cure}")
    return columns


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _rows(path: Path, batches: Iterator[Any], source: SourceSettings, bad: BadLines) -> Iterator[Document]:
    try:
        import pyarrow as pa
    except ImportError:
        raise InputError(f"{path}: needs pyarrow to be read; pip install 'urls-to-gpt2[parquet]'") from None
    number = 0
    try:
        for batch in batches:
            columns = [column.cast(_in_microseconds(column.type), safe=False) for column in batch.columns]
            for values in zip(*map(_values, columns), strict=True):
                number += 1
                where, row = f"{path}: row {number}", dict(zip(batch.schema.names, values, strict=True))
                if wrong := [name for name, value in row.items() if isinstance(value, Exception)]:
                    bad.lines += 1
                    bad.add(f"{where}: unreadable value in column {wrong[0]!r} ({row[wrong[0]]}); {_CURE}")
                else:
                    yield from read_record(orjson.dumps(row, default=_plain), where, source, bad)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(
            f"{path}: damaged after row {number} ({str(error).splitlines()[0]}); create it again"
        ) from None


def _values(column: Any) -> list[Any]:
    """The values of a column; an exception for what Python cannot hold, such as the year 33658."""
    try:
        return list(column.to_pylist())
    except (ArithmeticError, LookupError, ValueError) as error:
        return [error] if len(column) == 1 else [_values(column[row : row + 1])[0] for row in range(len(column))]


def _in_microseconds(kind: Any) -> Any:
    """The type with times in microseconds, as in Python, at any depth, and without dictionaries."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _in_microseconds(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_microseconds(field.type)) for field in kind.fields])
    if pa.types.is_map(kind):
        return pa.map_(_in_microseconds(kind.key_type), _in_microseconds(kind.item_type))
    if hasattr(kind, "value_field"):  # a list of some sort
        return pa.list_(_in_microseconds(kind.value_type))
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    return {"time64[ns]": pa.time64("us"), "duration[ns]": pa.duration("us")}.get(str(kind), kind)


def _plain(value: Any) -> str:
    """Convert a value that JSON lacks to text."""
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)
