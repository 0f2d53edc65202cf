import os
from pathlib import Path

import pytest

from common.files import content_hash


@pytest.mark.parametrize("size", [0, 1, 1 << 16, 1 << 20, (1 << 20) + 1, 3_000_001])
def test_an_input_has_changed_if_its_content_has_whatever_its_time(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a"
    data = bytearray(os.urandom(size))
    path.write_bytes(data)
    read = content_hash(path)
    os.utime(path, (1, 1))
    assert content_hash(path) == read, "touched"
    path.write_bytes(data + b"x")
    assert content_hash(path) != read
    for position in {0, size - 1} if size else ():
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        assert content_hash(path) != read, "of the same size"
