"""The fake Slurm of these tests, first in PATH, and commands in this process."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import Call, model_folder
from tests.training.helpers import run_main


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    """A Slurm without jobs."""
    made = FakeSlurm(tmp_path / "fake-slurm")
    monkeypatch.setenv("PATH", made.path)
    yield made
    made.close()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """`call(main, ARGUMENTS…)` runs a command in this process; returns its exit code and output."""

    def run(main: Callable[[list[str]], int], *arguments: object) -> "subprocess.CompletedProcess[str]":
        code = run_main(main, *arguments)
        said = capsys.readouterr()
        return subprocess.CompletedProcess([], code, said.out, said.err)

    return run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose job is looked at a hundred times per second."""
    for module in ("wait", "cancel"):
        monkeypatch.setattr(f"cluster.{module}.POLL", {"local": 0.1, "slurm": 0.01})
    monkeypatch.setattr("cluster.wait._LAG", 0.1)
    monkeypatch.setattr("cluster.job_end._RETRY", 0.01)
    return model_folder(tmp_path)
