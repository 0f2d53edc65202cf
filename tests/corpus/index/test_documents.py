"""PREFIX.docs: what it says of each document, through tokenize and merge_index."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InputError
from common.files import Document
from common.settings import TokenizeSettings
from corpus.index import IndexedDataset, IndexWriter, Meta, suffixed
from corpus.index.documents import DocumentTable
from corpus.merge_index import merge_index
from corpus.tokenize import tokenize
from corpus.urls.url import document_id
from tests.corpus.index.helpers import files, written
from tests.helpers import write_shard

META = Meta(vocab_size=300, end_of_text=299)
_DOCUMENT = st.fixed_dictionaries(
    {"id": st.integers(0, 2**64 - 1).map("{:016x}".format)},
    optional={
        "url": st.sampled_from(["https://a.example/x", "http://www.b.co.uk/ü?q=1", "no url", "https://[::1]/"]),
        "origin": st.sampled_from(["dump.warc.gz:0", "dump.warc.gz:981", "a:b.jsonl:7", "t.parquet: row 3"]),
    },
)


def write_dataset(prefix: Path, documents: Sequence[Document], shard: str = "0000") -> Path:
    with IndexWriter(prefix, "u2", META, table=True) as index:
        for number, document in enumerate(documents):
            index.add_document([number % 299, 299])
            assert index.table is not None
            index.table.add([document], shard)
    return prefix


@given(shards=st.lists(st.lists(_DOCUMENT, max_size=5), min_size=1, max_size=4).filter(any))
def test_every_row_says_what_its_document_said_after_merging(
    shards: list[list[Document]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("merged")
    prefixes = [write_dataset(folder / str(n), documents, f"{n:04d}") for n, documents in enumerate(shards)]
    merge_index(prefixes, folder / "all")
    table = DocumentTable(folder / "all")
    found = [tuple(table[number]) for number in range(len(table))]
    given = [
        (document["id"], document.get("url", ""), f"{n:04d}", document.get("origin", ""))
        for n, documents in enumerate(shards)
        for document in documents
    ]
    assert found == [(number, *row) for number, row in enumerate(given)]
    assert len(table) == IndexedDataset(folder / "all").n_documents
    for name in {row[0] for row in given}:
        assert table.of_ids([name]) == [number for number, row in enumerate(given) if row[0] == name]
    assert table.of_domain("b.co.uk") == [number for number, row in enumerate(given) if "b.co.uk" in row[1]]
    assert table.of_domain("elsewhere.example") == []


def test_24_bytes_per_document_beside_the_texts(tmp_path: Path) -> None:
    sizes = []
    for count in (1000, 2000):
        prefix = write_dataset(
            tmp_path / str(count), [{"id": f"{n:016x}", "url": "https://a.example/"} for n in range(count)]
        )
        sizes.append(suffixed(prefix, ".docs").stat().st_size)
    assert sizes[1] - sizes[0] == 1000 * (24 + len("https://a.example/"))


def test_tokenize_writes_a_row_for_each_document_it_keeps(tmp_path: Path) -> None:
    url = "https://www.corner.example/archive"
    documents: list[Document] = [
        {"id": document_id(url), "url": url, "text": "word " * 200},
        {"id": "00000000000000aa", "text": "short", "origin": "a.jsonl:2"},
        {"id": "00000000000000ab", "text": "long " * 200, "origin": "a.jsonl:3"},
    ]
    tokenize([write_shard(tmp_path / "0000.jsonl.zst", documents)], tmp_path / "0003", TokenizeSettings())
    table = DocumentTable(tmp_path / "0003_text_document")
    assert [tuple(table[number]) for number in range(len(table))] == [
        (0, document_id(url), url, "0003", ""),
        (1, "00000000000000ab", "", "0003", "a.jsonl:3"),
    ]
    assert table.of_url("http://corner.example/archive#top") == [0]
    assert table.of_domain("corner.example") == [0]
    with pytest.raises(InputError, match="not a URL"):
        table.of_url("corner")


def test_a_table_changes_no_other_file_and_a_merge_has_one_only_if_all_shards_have(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", [{"id": "0" * 16}] * 3)
    written(tmp_path / "b", [[number, 299] for number in range(3)], META)  # as of another tool
    assert files(tmp_path / "a") == files(tmp_path / "b")
    write_dataset(tmp_path / "all", [{"id": "1" * 16}])  # an older one must not stay
    merge_index([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    with pytest.raises(InputError, match=r"all\.docs: no such file: a dataset of another tool"):
        DocumentTable(tmp_path / "all")


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "of another dataset"])
def test_a_damaged_table_is_named(damage: str, tmp_path: Path) -> None:
    path = suffixed(write_dataset(tmp_path / "a", [{"id": "0" * 16, "url": "https://a.example/"}]), ".docs")
    whole = path.read_bytes()
    other = suffixed(write_dataset(tmp_path / "b", [{"id": "0" * 16}] * 2), ".docs").read_bytes()
    path.write_bytes({"cut": whole[:-9], "empty": b"", "foreign": b"x" * 100, "of another dataset": other}[damage])
    message = "belongs to another dataset" if damage == "of another dataset" else "damaged"
    with pytest.raises(InputError, match=rf"a\.docs: {message}"):
        DocumentTable(tmp_path / "a")
