"""Damage every bit of every file, and cut each to every length."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import InputError
from corpus.index import IndexedDataset, Meta
from tests.corpus.index.helpers import by_hand, contents, files, written

Damage = Callable[[bytes], Iterator[bytes]]
DOCUMENTS = [[1, 2, 3], [], [4, 50256]]


def flipped(data: bytes) -> Iterator[bytes]:
    for position in range(len(data)):
        for bit in range(8):
            yield data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def cut(data: bytes) -> Iterator[bytes]:
    for size in range(len(data)):
        yield data[:size]


def read(prefix: Path) -> tuple[list[list[list[int]]], Meta | None]:
    dataset = IndexedDataset(prefix)
    dataset.verify()
    return contents(dataset), dataset.description


@pytest.mark.parametrize("damage", [flipped, cut])
@pytest.mark.parametrize("suffix", [".idx", ".bin", ".json"])
def test_a_dataset_of_ours_is_itself_or_an_error(tmp_path: Path, suffix: str, damage: Damage) -> None:
    written(tmp_path / "a", DOCUMENTS)
    whole, path = read(tmp_path / "a"), tmp_path / f"a{suffix}"
    data = files(tmp_path / "a")[suffix]
    for changed in damage(data):
        path.write_bytes(changed)
        if changed == data[:-1] and suffix == ".json":  # its last line break
            assert read(tmp_path / "a") == whole
        else:
            with pytest.raises(InputError, match=r"a\.(idx|bin|json): "):
                read(tmp_path / "a")


@pytest.mark.parametrize("damage", [flipped, cut])
def test_a_damaged_index_of_others_gives_an_error_or_the_same_tokens(tmp_path: Path, damage: Damage) -> None:
    """Without a checksum, a document's border may move between sequences, but a sequence's never does."""
    by_hand(tmp_path / "a", [[tokens] for tokens in DOCUMENTS])
    data = files(tmp_path / "a")[".idx"]
    unseen = 0
    for changed in damage(data):
        (tmp_path / "a.idx").write_bytes(changed)
        try:
            dataset = IndexedDataset(tmp_path / "a")
            dataset.verify()
        except InputError as error:
            assert "\n" not in str(error) and ("a.idx: " in str(error) or "a.bin: " in str(error))
        else:
            assert [dataset[number].tolist() for number in range(len(dataset))] == DOCUMENTS
            unseen += 1
    assert unseen <= 4  # a border between documents, moved by one
