"""The fake Slurm of these tests, first in PATH."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import model_folder


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    """A Slurm without jobs."""
    made = FakeSlurm(tmp_path / "fake-slurm")
    monkeypatch.setenv("PATH", made.path)
    for name, value in (("SQUEUE_PARTITION", "low"), ("SBATCH_EXPORT", "NONE"), ("SLURM_TIME_FORMAT", "relative")):
        monkeypatch.setenv(name, value)  # the fake's commands refuse them
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose job is looked at a hundred times per second."""
    monkeypatch.setattr("cluster.jobs.POLL", {"local": 0.1, "slurm": 0.01})
    monkeypatch.setattr("cluster.jobs._LAG", 0.1)
    monkeypatch.setattr("cluster.job_end._RETRY", 0.01)
    return model_folder(tmp_path)
