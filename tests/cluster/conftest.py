"""The fake Slurm of these tests, first in PATH."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fake_slurm import FakeSlurm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    """A Slurm without jobs."""
    made = FakeSlurm(tmp_path / "fake-slurm")
    monkeypatch.setenv("PATH", made.path)
    yield made
    made.close()
