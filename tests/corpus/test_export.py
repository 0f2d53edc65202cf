import gzip
import sys
from pathlib import Path

import orjson
import pytest

import corpus.export
from common.files import Document, read_json
from tests.helpers import assert_one_line_error, called, document, prose, write_shard

FORMATS = {"parquet": ".parquet", "jsonl": ".jsonl.gz"}
META = {"date": "2020-01-01", "size": 2**63, "tags": ["a", None]}
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)


@pytest.fixture
def documents(tmp_path: Path) -> list[list[Document]]:
    """Of three shards in `in`: the first without URL or meta, the second empty, the third with odd characters."""
    plain: list[Document] = [{"id": f"{n:016x}", "url": None, "text": prose(n)} for n in range(40)]
    last = [document(40, "ünï\x00 \U0001f40d\r\n" * 50, meta=META, lang="en"), document(41, "", meta={"date": 7})]
    for number, shard in enumerate((plain, [], last)):
        write_shard(tmp_path / f"in/{number:04d}.jsonl.zst", shard)
    return [plain, [], last]


def read(path: Path) -> list[Document]:
    if path.suffix == ".gz":
        return [orjson.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    file = pytest.importorskip("pyarrow.parquet").ParquetFile(path)
    assert file.num_row_groups >= file.metadata.num_rows / 8  # they bound the memory
    return [row for group in range(file.num_row_groups) for row in file.read_row_group(group).to_pylist()]


@EVERY_FORMAT
def test_every_document_is_there_in_order_and_workers_change_no_byte(
    tmp_path: Path, documents: list[list[Document]], format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus.export, "_ROW_GROUP", 4000)
    outputs, names = [], [f"000{number}{FORMATS[format]}" for number in range(3)]
    for workers in (1, 2, 1):  # the third time, finished files are replaced
        options = ("--format", format, "--workers", workers, "--stats", tmp_path / "s.json")
        folder = tmp_path / f"out{workers}"
        assert called("corpus.export", "--input", tmp_path / "in", "--output-dir", folder, *options).returncode == 0
        outputs.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert outputs[0] == outputs[1] == outputs[2] and sorted(outputs[0]) == names
    for name, shard in zip(names, documents, strict=True):
        rows = read(tmp_path / "out1" / name)
        expected = [(one["id"], one["url"] or "", one["text"]) for one in shard]
        assert [(row["id"], row["url"], row["text"]) for row in rows] == expected
    assert [orjson.loads(row["meta"]) for row in rows] == [{**META, "lang": "en"}, {"date": 7}]
    assert read_json(tmp_path / "s.json")["documents_out"] == 42


@EVERY_FORMAT
def test_datasets_loads_it(tmp_path: Path, documents: list[list[Document]], format: str) -> None:
    datasets = pytest.importorskip("datasets")
    corpus.export.export(sorted((tmp_path / "in").iterdir()), tmp_path, format)  # type: ignore[arg-type]
    given = {"data_files": [str(path) for path in sorted(tmp_path.glob("000*"))], "cache_dir": tmp_path / "cache"}
    for streaming in (False, True):
        rows = datasets.load_dataset(format.removesuffix("l"), split="train", streaming=streaming, **given)
        assert [row["text"] for row in rows] == [one["text"] for shard in documents for one in shard]


def test_what_cannot_be_exported_is_one_line(
    tmp_path: Path, documents: list[list[Document]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = tmp_path / "in/0000.jsonl.zst", ("--output-dir", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        assert_one_line_error(called("corpus.export", "--input", source, *folder), "pyarrow", "[parquet]")
    empty = ("--input", tmp_path / "in/0001.jsonl.zst")
    assert_one_line_error(called("corpus.export", *empty, *folder), "0001.jsonl.zst", "no documents")
    source.write_bytes(source.read_bytes()[:-30])
    for format in FORMATS:
        assert_one_line_error(called("corpus.export", "--input", source, *folder, "--format", format), source.name)
    assert not list((tmp_path / "out").glob("0000*"))
