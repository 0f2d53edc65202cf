import struct
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import EmptyResultError, InputError
from corpus.index import IndexedDataset, Meta
from corpus.merge_index import expand_prefixes, merge_index
from tests.conftest import Command
from tests.corpus.index.helpers import META, by_hand, files, written
from tests.helpers import assert_one_line_error, called


def test_every_document_of_every_shard_comes_out_in_order(tmp_path: Path) -> None:
    shards = [[], [[], [1, 2], [3]], [], [[], [4, 5, 6]], [[7]], []]
    prefixes = [written(tmp_path / f"{n}", documents).prefix for n, documents in enumerate(shards)]
    stats = merge_index(prefixes, tmp_path / "all")
    written(tmp_path / "one", [tokens for documents in shards for tokens in documents])
    assert files(tmp_path / "all") == files(tmp_path / "one")
    assert (stats.documents_in, stats.documents_out, stats.bytes_out, stats.extra["tokens"]) == (6, 6, 14, 7)


def test_shards_that_differ_are_damaged_or_hold_nothing_are_refused_by_name(tmp_path: Path) -> None:
    first, damaged = written(tmp_path / "a", [[1]]).prefix, written(tmp_path / "e", [[1, 2, 3]]).prefix
    (tmp_path / "e.bin").write_bytes(struct.pack("<3H", 1, 2, 4))
    trained = [written(tmp_path / f"t{n}", [[1]], replace(META, vocabulary=f"{n}")).prefix for n in range(2)]
    empty = [written(tmp_path / name, []).prefix for name in "fg"]
    with pytest.raises(InputError, match=r"t1\.json: merges 1, but .*t0\.json: merges 0"):
        merge_index(trained, tmp_path / "all")
    for other, said in (
        (written(tmp_path / "b", [[1]], dtype="<i4").prefix, r"b\.idx: int32"),
        (written(tmp_path / "c", [[1]], Meta(500, 499)).prefix, r"c\.json: .* 500"),
        (by_hand(tmp_path / "d", [[[1]]]), r"d\.json"),
        (damaged, r"e\.bin"),
        (by_hand(tmp_path / "h", [[[1]]], modes=[1]), r"h\.(json|idx)"),
    ):
        with pytest.raises(InputError, match=said):
            merge_index([first, other], tmp_path / "all")
    with pytest.raises(EmptyResultError):
        merge_index(empty, tmp_path / "all")
    assert not list(tmp_path.glob("all*"))


def test_the_command_takes_prefixes_index_files_and_folders_in_the_order_of_their_numbers(
    tmp_path: Path, command: Command
) -> None:
    for number in (10, 0, 2, 1):
        written(tmp_path / f"tokens/{number:04d}_text_document", [[number]])
    folder, output = tmp_path / "tokens", ("--output-prefix", tmp_path / "all")
    for inputs, tokens in (
        ([folder / "0001_text_document", folder / "0000_text_document.idx"], [1, 0]),
        ([folder], [0, 1, 2, 10]),
        ([folder, "--shards", "2"], [0, 1]),  # the others are of an earlier, larger run
    ):
        assert called("corpus.merge_index", "--inputs", *inputs, *output).returncode == 0
        assert IndexedDataset(tmp_path / "all").tokens.tolist() == tokens
    missing = command("corpus.merge_index", "--inputs", folder, "--shards", 4, *output)
    assert_one_line_error(missing, "0003_text_document.idx")
    names = [prefix.name for prefix in expand_prefixes([tmp_path], 10_002)]
    assert names[999:1001] == ["0999_text_document", "1000_text_document"] and names[-1] == "10001_text_document"
