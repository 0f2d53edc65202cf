import os
import struct
from pathlib import Path

import numpy as np
import pytest

from common.errors import EmptyResultError, InputError
from corpus.index import IndexedDataset, IndexWriter, Meta
from corpus.merge_index import expand_prefixes, main, merge_index
from tests.conftest import Command
from tests.corpus.index.helpers import by_hand, contents, files, written
from tests.helpers import assert_one_line_error


def shard(prefix: Path, documents: list[list[int]], dtype: str = "u2", vocab_size: int = 50257) -> Path:
    with IndexWriter(prefix, np.dtype(dtype), Meta(vocab_size, vocab_size - 1)) as index:
        for tokens in documents:
            index.add_document(tokens)
    return prefix


def test_every_document_of_every_shard_comes_out_in_order(tmp_path: Path) -> None:
    shards = [[], [[], [1, 2], [3]], [], [[], [4, 5, 6]], [[7]], []]
    prefixes = [shard(tmp_path / f"{n}", documents) for n, documents in enumerate(shards)]
    stats = merge_index(prefixes, tmp_path / "all")
    written(tmp_path / "one", [tokens for documents in shards for tokens in documents])
    assert files(tmp_path / "all") == files(tmp_path / "one")
    assert (stats.documents_in, stats.documents_out, stats.bytes_out, stats.extra["tokens"]) == (6, 6, 14, 7)


def test_documents_of_several_sequences_stay_together(tmp_path: Path) -> None:
    first = by_hand(tmp_path / "a", [[], [[1, 2], [3]], [[4], [], [5]]])
    second = by_hand(tmp_path / "b", [[[6]], [], [[]]])
    merge_index([first, second, first], tmp_path / "all")
    by_hand(
        tmp_path / "expected", [*contents(IndexedDataset(first)), [[6]], [], [[]], [], [[1, 2], [3]], [[4], [], [5]]]
    )
    assert files(tmp_path / "all") == files(tmp_path / "expected")


def test_modes_are_kept_where_all_have_them_and_never_dropped(tmp_path: Path) -> None:
    pictures = by_hand(tmp_path / "a", [[[1], [2]], [[3]]], modes=[0, 1, 1])
    more, empty = by_hand(tmp_path / "b", [[[4]]], modes=[1]), by_hand(tmp_path / "c", [])
    merge_index([empty, pictures, empty, more], tmp_path / "all")
    by_hand(tmp_path / "expected", [[[1], [2]], [[3]], [[4]]], modes=[0, 1, 1, 1])
    assert files(tmp_path / "all") == files(tmp_path / "expected")
    text = by_hand(tmp_path / "d", [[[5]]])
    for inputs, message in (([pictures, text], r"d\.idx: no modes"), ([text, pictures], r"a\.idx: has modes")):
        with pytest.raises(InputError, match=message):
            merge_index(inputs, tmp_path / "mixed")
    assert not list(tmp_path.glob("mixed*"))


def test_shards_of_another_dtype_or_vocabulary_are_refused_by_name(tmp_path: Path) -> None:
    first = shard(tmp_path / "a", [[1]])
    by_hand(tmp_path / "d", [[[1]]])
    for other, message in (
        (
            shard(tmp_path / "b", [[1]], dtype="i4"),
            r"b\.idx: int32, but .*a\.idx: uint16; tokenize all shards with one",
        ),
        (shard(tmp_path / "c", [[1]], vocab_size=500), r"c\.json: vocabulary of 500, .*a\.json: vocabulary of 50257"),
        (tmp_path / "d", r"d\.json: no such file, but .*a\.json: vocabulary of 50257"),
    ):
        with pytest.raises(InputError, match=message):
            merge_index([first, other], tmp_path / "all")
    assert not list(tmp_path.glob("all*"))


def test_damage_is_not_passed_on(tmp_path: Path) -> None:
    prefixes = [shard(tmp_path / f"{n}", [[1, 2, 3]]) for n in range(2)]
    (tmp_path / "1.bin").write_bytes(struct.pack("<3H", 1, 2, 4))
    with pytest.raises(InputError, match=r"1\.bin: its checksum is not that of 1\.json"):
        merge_index(prefixes, tmp_path / "all")
    assert not list(tmp_path.glob("all*"))


def test_no_documents_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EmptyResultError, match="no documents in 2 shard"):
        merge_index([shard(tmp_path / "a", []), shard(tmp_path / "b", [])], tmp_path / "all")
    assert not list(tmp_path.glob("all*"))


def test_an_input_may_not_be_the_output_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shard(Path("a"), [[1]])
    before = files(tmp_path / "a")
    Path("folder").symlink_to(tmp_path)
    for suffix in before:
        Path(f"b{suffix}").symlink_to(f"a{suffix}")
    for spelling in ("a", f"../{tmp_path.name}/a", "folder/a", f"{tmp_path}/a", "b"):
        with pytest.raises(InputError, match="would overwrite the input"):
            merge_index([Path(spelling)], Path("a"))
    assert files(tmp_path / "a") == before


def test_the_command_takes_prefixes_index_files_and_folders(tmp_path: Path) -> None:
    for number in (0, 1, 2, 10):
        shard(tmp_path / f"tokens/{number:04d}_text_document", [[number]])
    for inputs, tokens in (
        ([f"{tmp_path}/tokens/0001_text_document", f"{tmp_path}/tokens/0000_text_document.idx"], [1, 0]),
        ([f"{tmp_path}/tokens"], [0, 1, 2, 10]),
        ([f"{tmp_path}/tokens", "--shards", "2"], [0, 1]),  # the others are of an earlier, larger run
    ):
        assert main(["--inputs", *inputs, "--output-prefix", f"{tmp_path}/all"]) == 0
        assert IndexedDataset(tmp_path / "all").tokens.tolist() == tokens


def test_shards_are_counted_in_numbers_not_in_letters(tmp_path: Path) -> None:
    names = [prefix.name for prefix in expand_prefixes([tmp_path], 10_002)]
    assert names[999:1001] == ["0999_text_document", "1000_text_document"] and names[-1] == "10001_text_document"


def test_a_shard_that_is_missing_is_named(tmp_path: Path, command: Command) -> None:
    shard(tmp_path / "0000_text_document", [[1]])
    run = ("corpus.merge_index", "--output-prefix", tmp_path / "all", "--inputs")
    assert_one_line_error(command(*run, tmp_path, "--shards", 2), "0001_text_document.idx", "no such file")
    (tmp_path / "none").mkdir()
    for inputs, message in (
        ([tmp_path / "none"], "none: no *.idx in this folder"),
        ([tmp_path / "x", "--shards", 2], "x: is not a folder; --shards takes shards out of a folder"),
    ):
        assert_one_line_error(command(*run, *inputs), message)


@pytest.mark.slow
def test_more_than_four_gigabytes_are_merged(tmp_path: Path) -> None:
    """A sequence of 2^31 - 1 tokens in a sparse file, and what follows it; written in full."""
    longest = 2**31 - 1
    with open(tmp_path / "a.bin", "wb") as file:
        file.seek(2 * longest)
        file.write(struct.pack("<2H", 8, 9))
    index = struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i2q3q", longest, 2, 0, 2 * longest, 0, 1, 2)
    (tmp_path / "a.idx").write_bytes(b"MMIDIDX\x00\x00" + index)
    merge_index([tmp_path / "a", by_hand(tmp_path / "b", [[[1, 2, 3]], [[4], [5]]])], tmp_path / "all")
    merged = IndexedDataset(tmp_path / "all")
    assert merged.pointers.tolist() == [0, 2**32 - 2, 2**32 + 2, 2**32 + 8, 2**32 + 10]
    assert merged.document_index.tolist() == [0, 1, 2, 3, 5]
    assert [merged[n].tolist() for n in range(1, 5)] == [[8, 9], [1, 2, 3], [4], [5]]
    os.truncate(tmp_path / "all.bin", 0)  # four gigabytes that no later test needs
