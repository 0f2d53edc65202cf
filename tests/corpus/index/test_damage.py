"""Damage every byte of every file, and cut each to every length."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import InputError
from corpus.index import IndexedDataset, Meta
from tests.corpus.index.helpers import contents, files, written

DOCUMENTS = [[1, 2, 3], [], [4, 50256]]


def damaged(data: bytes) -> Iterator[bytes]:
    """The data with one bit flipped in each byte, another one in each, and cut to each length."""
    for position in range(len(data)):
        yield data[:position]
        for bit in (position % 8, (position + 3) % 8):
            yield data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def read(prefix: Path) -> tuple[list[list[list[int]]], Meta | None]:
    dataset = IndexedDataset(prefix)
    dataset.verify()
    return contents(dataset), dataset.meta


@pytest.mark.parametrize("suffix", [".idx", ".bin", ".json"])
def test_a_dataset_of_ours_is_itself_or_an_error(tmp_path: Path, suffix: str) -> None:
    written(tmp_path / "a", DOCUMENTS)
    whole, path = read(tmp_path / "a"), tmp_path / f"a{suffix}"
    data = files(tmp_path / "a")[suffix]
    for changed in damaged(data):
        path.write_bytes(changed)
        if changed == data[:-1] and suffix == ".json":  # its last line break
            assert read(tmp_path / "a") == whole
        else:
            with pytest.raises(InputError, match=r"a\.(idx|bin|json): "):
                read(tmp_path / "a")
