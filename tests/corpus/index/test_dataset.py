import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.errors import InputError
from corpus.index import IndexedDataset, Meta, read_meta
from corpus.index.layout import pointers
from tests.conftest import Command
from tests.corpus.index.helpers import CODES, META, by_hand, contents, files, written
from tests.helpers import assert_one_line_error, called

SEVERAL = [[[1, 2], [3]], [], [[]], [[4, 5, 6], [], [7]]]  # documents of 2, 0, 1 and 3 sequences


@pytest.mark.parametrize("kind", list(CODES))
def test_the_files_of_others_are_read(tmp_path: Path, kind: str) -> None:
    dataset = IndexedDataset(by_hand(tmp_path / "a", SEVERAL, kind))
    dataset.verify()
    assert contents(dataset) == SEVERAL
    assert [dataset.document(n).tolist() for n in range(4)] == [[1, 2, 3], [], [], [4, 5, 6, 7]]


def test_the_vocabulary_travels_with_the_dataset_and_bounds_its_ids(tmp_path: Path) -> None:
    written(tmp_path / "a", [[1]])
    assert read_meta(tmp_path / "a") == META
    by_hand(tmp_path / "b", SEVERAL)
    assert read_meta(tmp_path / "b") is None
    (tmp_path / "b.json").write_text('{"vocab_size": 8, "end_of_text": 7}')  # by hand, without a checksum
    IndexedDataset(tmp_path / "b").verify()
    assert read_meta(tmp_path / "b") == Meta(8, 7)
    (tmp_path / "b.json").write_text('{"vocab_size": 7, "end_of_text": 6}')
    with pytest.raises(InputError, match="token 6 is 7"):
        IndexedDataset(tmp_path / "b").verify()
    by_hand(tmp_path / "c", [[[0] * 5 + [-7]]], "i")
    with pytest.raises(InputError, match="token 5 is -7"):
        IndexedDataset(tmp_path / "c").verify()


@pytest.mark.parametrize(
    ("offset", "layout", "value", "said"),
    [
        (34, "<i", -3, "sequence 0 "),
        (34 + 8, "<q", 2, "sequence 0 is 2, but it begins at 0"),
        (34 + 8 + 8, "<q", 2, "sequence 1 is 2, but it begins at 6"),
        (34 + 8 + 16, "<q", 1, "document index"),
        (34 + 8 + 16 + 8, "<q", 5, "document index"),
        (34 + 8 + 16 + 16, "<q", 1, "document index"),
    ],
)
def test_opening_names_what_contradicts_itself(tmp_path: Path, offset: int, layout: str, value: int, said: str) -> None:
    written(tmp_path / "a", [[1, 2, 3], [4, 5]], meta=None)
    data = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into(layout, data, offset, value)
    (tmp_path / "a.idx").write_bytes(data)
    with pytest.raises(InputError, match=rf"a\.idx: .*{said}"):
        IndexedDataset(tmp_path / "a")


def test_beyond_four_gigabytes_nothing_wraps(tmp_path: Path) -> None:
    """Two sequences of 2^31 - 1 tokens and a short one, 8 GiB in a sparse file."""
    longest = 2**31 - 1
    begins, end = pointers(np.array([longest, longest, 3], np.int32), 0, 2)
    assert begins.tolist() == [0, 2**32 - 2, 2**33 - 4] and end == 2**33 + 2
    assert pointers(np.array([longest], np.int32), end, 4)[1] == end + 4 * longest
    with open(tmp_path / "a.bin", "wb") as file:
        file.seek(2**33 - 6)
        file.write(struct.pack("<4H", 6, 7, 8, 9))
    index = struct.pack("<QBQQ3i", 1, 8, 3, 4, longest, longest, 3) + struct.pack("<7q", *begins, 0, 1, 2, 3)
    (tmp_path / "a.idx").write_bytes(b"MMIDIDX\x00\x00" + index)
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset[2].tolist() == dataset.document(2).tolist() == [7, 8, 9]
    assert int(dataset[1][-1]) == 6 and len(dataset[1]) == longest


def test_inspect_says_what_is_inside_and_reads_every_token_where_asked(tmp_path: Path, command: Command) -> None:
    written(tmp_path / "a", [[1] * 9 + [50256], [2] * 1000, [], [50256]])
    told = command("corpus.index", "inspect", tmp_path / "a", "--verify")
    rows = [line.split() for line in told.stdout.splitlines()]
    for row in (["documents", "4"], ["tokens", "1,011"], ["longest", "1,000", "tokens"], ["verified"]):
        assert row in rows, told
    (tmp_path / "a.bin").write_bytes(bytes(4) + files(tmp_path / "a")[".bin"][4:])
    assert called("corpus.index", "inspect", tmp_path / "a").returncode == 0
    assert_one_line_error(called("corpus.index", "inspect", tmp_path / "a", "--verify"), "a.bin")


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
    written(tmp_path / "a", [[1, 2, 3], [], [4, 50256]])
    whole, path = read(tmp_path / "a"), tmp_path / f"a{suffix}"
    data = files(tmp_path / "a")[suffix]
    for changed in damaged(data):
        path.write_bytes(changed)
        if changed == data[:-1] and suffix == ".json":  # its last line break
            assert read(tmp_path / "a") == whole
        else:
            with pytest.raises(InputError, match=r"a\.(idx|bin|json): "):
                read(tmp_path / "a")
