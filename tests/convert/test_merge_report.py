"""Files are hashed side by side; test_merge_mp.py and test_every_origin.py read the report."""

import hashlib
from pathlib import Path

import pytest
import xxhash

from convert.merge_report import hash_files
from training.huggingface.origin import digest


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("empty", "small", "large")]
    for path, size in zip(paths, (0, 7, (1 << 20) + 3), strict=True):
        path.write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    done: list[int] = []
    found = hash_files(paths, done.append)
    for path in paths:
        with path.open("rb") as file:
            expected = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        assert found[path] == {"size": path.stat().st_size, "xxh3": expected} == digest(path)
    assert sum(done) == sum(path.stat().st_size for path in paths)
    with pytest.raises(OSError, match="absent"):
        hash_files([tmp_path / "absent"])
