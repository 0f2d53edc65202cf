from pathlib import Path

import numpy as np
import pytest

from common.errors import InputError
from corpus.dedup.segments import Segments, write_segments


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with write_segments(tmp_path / "some.file", {"rows": 5}) as file:
        file.append("a", np.arange(3, dtype=np.int64))
        file.append("b", np.array([7], dtype=np.uint8))
        file.append("a", np.arange(2, dtype=np.int64))
        file.append("a", np.empty(0, dtype=np.int64))
    return tmp_path / "some.file"


def test_what_was_appended_is_read_back(path: Path) -> None:
    with Segments(path) as file:
        assert file.info == {"rows": 5}
        assert file.read("a", "<i8").tolist() == [0, 1, 2, 0, 1]
        assert [array.tolist() for array in file.each("a")] == [[0, 1, 2], [0, 1]]
        assert file.read("none", "<u4").dtype == np.uint32 and len(file.read("none", "<u4")) == 0


def test_a_file_cut_short_or_changed_anywhere_is_an_error_that_names_it(path: Path) -> None:
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(InputError, match=r"some\.file: .*again"):
            Segments(path)
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        with pytest.raises(InputError, match=r"some\.file: .*again"):
            with Segments(path) as file:
                file.read("a", "<i8")
                file.read("b", "<u1")


def test_a_missing_file_says_which_phase_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none: no such file"):
        Segments(tmp_path / "none")


def test_nothing_is_left_when_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        with write_segments(tmp_path / "file", {}):
            raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
