import datetime
import decimal
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import InputError
from common.files import BadLines, write_json
from common.settings import SourceSettings
from corpus.sources.preview import preview
from corpus.sources.tables import read_arrow, read_parquet
from tests.corpus.test_ingest import take
from tests.helpers import assert_one_line_error, called

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
FORMATS = pytest.mark.parametrize("kind", ["parquet", "stream", "file"])


def write(path: Path, table: Any, rows: int = 1000) -> Path:
    """A Parquet file, or an Arrow file or stream, by the name's end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows, write_batch_size=50)  # after which a page may end
        return path
    opened = pa.ipc.new_file if path.suffix == ".feather" else pa.ipc.new_stream
    with opened(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def named(folder: Path, kind: str) -> Path:
    return folder / {"parquet": "a.parquet", "stream": "a.arrow", "file": "a.feather"}[kind]


@FORMATS
def test_rows_are_documents_and_other_columns_go_under_meta_as_json(tmp_path: Path, kind: str) -> None:
    time = datetime.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    columns = {
        "id": [7, 8], "url": ["http://a.example/", None], "body": pa.array(["One.", "Two."]).dictionary_encode(),
        "time": pa.array([1577934245000006789, None], pa.timestamp("ns", "UTC")), "day": [time.date(), None],
        "clock": pa.array([time.time(), None], pa.time64("ns")), "price": [decimal.Decimal("1.50"), None],
        "raw": [b"\xff", None], "nan": [float("nan"), 1.5], "deep": [{"a": [{"b": 1}]}, None],
        "unused": ["x" * 70_000, ""],
    }  # fmt: skip
    path = write(named(tmp_path, kind), pa.table(columns), rows=1)
    first, second = take(tmp_path, path, text_key="body", skip_keys=["unused"])
    assert (first["text"], first["source_id"], first["url"]) == ("One.", "7", "http://a.example/")
    assert first["meta"] == {
        "time": "2020-01-02T03:04:05.000006+00:00", "day": "2020-01-02", "clock": "03:04:05.000006", "price": "1.50",
        "raw": "/w==", "nan": None, "deep": {"a": [{"b": 1}]},
    }  # fmt: skip
    assert second["source_id"] == "8" and "url" not in second and second["meta"]["nan"] == 1.5
    with pytest.raises(InputError, match=r"a\.\w+: row 1: 70,\d+ bytes .* 'unused' under skip_keys; 1 of 2"):
        take(tmp_path, path, text_key="body")


@FORMATS
def test_a_column_that_does_not_fit_and_a_damaged_file_are_one_line(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(named(tmp_path, kind), pa.table({"text": ["One.", None, "Three."] * 500, "n": [1, 2, 3] * 500}))
    with pytest.raises(InputError, match=r"no column 'tex', but text, n; set text_key \(did you mean 'text'\?\)$"):
        take(tmp_path, path, text_key="tex")
    with pytest.raises(InputError, match=r"no column 'tex', but text, n; set text_key"):
        preview([SourceSettings(path=str(path), text_key="tex")], 0.001)
    with pytest.raises(InputError, match=r"column 'n' is int64, no text; set text_key to one of text$"):
        take(tmp_path, path, text_key="n")
    with pytest.raises(InputError, match=r"column 'text' is binary, no text; write it as string"):
        take(tmp_path, write(named(tmp_path / "b", kind), pa.table({"text": [b"One."]})))
    with pytest.raises(InputError, match=r"a\.\w+: row 2: no string under 'text'; 500 of 1500"):
        take(tmp_path, path)
    assert len(take(tmp_path, path, max_bad_share=0.5)) == 1000
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        output = ("--output", tmp_path / "new.jsonl.zst")
        assert_one_line_error(called("corpus.ingest", "--input", path, *output), path.name, "[parquet]")
    whole = path.read_bytes()
    for kept in (7, len(whole) // 2, len(whole) - 8, len(whole) - 1):  # 8: the last message of a stream
        path.write_bytes(whole[:kept])
        with pytest.raises(InputError, match=r"a\.\w+: (damaged|truncated)"):
            take(tmp_path / "new", path)
    assert not list(tmp_path.glob("new/*"))


@FORMATS
def test_what_python_cannot_hold_is_a_bad_line_and_a_doubled_column_is_refused(tmp_path: Path, kind: str) -> None:
    far, time = pa.array([10**18, 0], pa.timestamp("us")), pa.array([1577934245000006789, None], pa.timestamp("ns"))
    ends, texts = pa.array([0, 1, 2], pa.int32()), pa.array(["One.", "Two."])
    unreadable = {
        "time": far, "day": pa.array([10**8, 0], pa.date32()), "list": pa.ListArray.from_arrays(ends, far),
        "zone": pa.array([0, None], pa.timestamp("us", "Mars/Phobos")),
        "bytes": pa.array([b"\xff", b""]).view(pa.string()),
    }  # fmt: skip
    for name, column in unreadable.items():
        path = write(named(tmp_path, kind), pa.table({"text": texts, name: column}), rows=1)
        assert [one["text"] for one in take(tmp_path, path, max_bad_share=0.5)] == ["Two."]
        with pytest.raises(InputError, match=rf"row 1: unreadable value in column '{name}' .* skip_keys; 1 of 2"):
            take(tmp_path / "new", path)
        assert len(take(tmp_path, path, skip_keys=[name])) == 2
    deep = {
        "list": pa.ListArray.from_arrays(ends, time), "struct": pa.StructArray.from_arrays([time], ["a"]),
        "map": pa.MapArray.from_arrays(ends, ["a", "b"], time), "dict": time.dictionary_encode(),
        "price": pa.array([[decimal.Decimal("1.50")], None]), "same": pa.array([1, 1]).dictionary_encode(),
    }  # fmt: skip
    ours, *_ = take(tmp_path, write(named(tmp_path, kind), pa.table({"text": texts, **deep})))
    iso = "2020-01-02T03:04:05.000006"
    assert ours["meta"] == {
        "list": [iso], "struct": {"a": iso}, "map": [["a", iso]], "dict": iso, "price": ["1.50"], "same": 1
    }  # fmt: skip
    for names in (["text", "text"], ["text", "x", "x"]):
        path = write(named(tmp_path, kind), pa.Table.from_arrays([texts] * len(names), names=names))
        with pytest.raises(InputError, match=rf"a\.\w+: column '{names[-1]}' occurs twice; create .* skip_keys"):
            take(tmp_path / "new", path)
    assert len(take(tmp_path, path, skip_keys=["x"])) == 2


def test_files_without_rows_row_groups_or_bytes(tmp_path: Path) -> None:
    empty = pa.table({"text": pa.array([], pa.string())})
    full = tmp_path / "full.parquet"
    with pq.ParquetWriter(full, empty.schema) as groups:
        for table in (empty, pa.table({"text": ["One."]}), empty):
            groups.write_table(table)
    paths = [write(tmp_path / name, empty) for name in ("a.parquet", "b.arrow", "c.feather")]
    pq.ParquetWriter(tmp_path / "groups.parquet", empty.schema).close()
    assert [one["text"] for one in take(tmp_path, *paths, tmp_path / "groups.parquet", full)] == ["One."]
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(InputError, match=r"a\.parquet: damaged"):
        take(tmp_path, tmp_path / "a.parquet")


def test_a_dataset_folder_stands_for_its_train_split(tmp_path: Path) -> None:
    def texts(folder: str, **options: Any) -> list[str]:
        return [one["text"] for one in take(tmp_path / "out", tmp_path / folder, **options)]

    for name in ("hub/data/train-00000-of-00002", "hub/data/train-00001-of-00002", "hub/data/test-00000-of-00001"):
        write(tmp_path / f"{name}.parquet", pa.table({"text": [name]}))
    for name in ("saved/train/data-00000-of-00001", "saved/train/cache-1f", "saved/test/data-00000-of-00001"):
        write(tmp_path / f"{name}.arrow", pa.table({"text": [name]}))
        write_json((tmp_path / name).with_name("dataset_info.json"), {})
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        write_json((tmp_path / name).with_name("state.json"), state)
    (tmp_path / "hub/README.md").write_text("# Card")
    assert texts("hub") == [f"hub/data/train-0000{n}-of-00002" for n in range(2)]
    assert texts("hub", glob=["data/test-*"]) == ["hub/data/test-00000-of-00001"]
    assert texts("saved") == texts("saved/train") == ["saved/train/data-00000-of-00001"]
    assert texts("saved/test") == ["saved/test/data-00000-of-00001"]
    write_json(tmp_path / "saved/test/state.json", {"step": 3})  # another program's
    assert texts("saved/test") == ["saved/test/data-00000-of-00001"]
    (tmp_path / "saved/train/data-00000-of-00001.arrow").unlink()
    with pytest.raises(FileNotFoundError, match=r"data-00000-of-00001\.arrow"):
        texts("saved/train")


def test_a_batch_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    monkeypatch.setattr("corpus.sources.tables.read_record", lambda *_: held.append(pa.total_allocated_bytes()) or [])
    table, source = (
        pa.table({"text": [random.Random(n).randbytes(8000).hex() for n in range(2000)]}),
        SourceSettings(path=""),
    )
    before = pa.total_allocated_bytes()
    list(read_parquet(write(tmp_path / "a.parquet", table, rows=2000), source, BadLines(0)))
    list(read_arrow(write(tmp_path / "a.arrow", table, rows=100), source, BadLines(0)))
    assert len(held) == 4000 and max(held) - before < table.nbytes / 2
