"""The command: what `build` prints and does, and `check` on a machine without a GPU and on one with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers import run_main
from tests.training.kernels.helpers import write_nvcc
from training.kernels import library
from training.kernels.__main__ import main


@pytest.fixture(autouse=True)
def unprepared() -> Iterator[None]:
    library.prepare.cache_clear()
    yield
    library.prepare.cache_clear()


def test_build_compiles_once_and_a_failure_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = write_nvcc(tmp_path, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for _ in range(2):
        assert run_main(main, "build") == 0
        (built,) = (tmp_path / "cache").glob("*.so")
        assert capsys.readouterr().out.startswith(f"{built}: ")
    assert len(calls.read_text().splitlines()) == 1

    write_nvcc(tmp_path / "broken", monkeypatch, "echo 'x.cu(7): error: no such type'; exit 1")
    assert run_main(main, "build") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "x.cu(7)" in error
    write_nvcc(tmp_path / "another", monkeypatch, "echo 'x.cu(7): error: no such type'; exit 1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "x.cu(7)" in library.prepare() == library.prepare()  # a run warns once
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.startswith("warning: ") and "x.cu(7)" in printed
