"""The command: what `build` prints and does, and `check` on a machine without a GPU and on one with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.training.helpers import run_main
from tests.training.kernels.conftest import CACHE
from tests.training.kernels.helpers import write_nvcc
from training.kernels import library
from training.kernels.__main__ import main
from training.kernels.choice import KERNELS


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

    write_nvcc(tmp_path, monkeypatch, "echo 'x.cu(7): error: no such type'; exit 1")
    assert run_main(main, "build", "--architectures", "80") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "x.cu(7)" in error
    write_nvcc(tmp_path / "another", monkeypatch, "echo 'x.cu(7): error: no such type'; exit 1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "x.cu(7)" in library.prepare() == library.prepare()  # a run warns once
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.startswith("warning: ") and "x.cu(7)" in printed


def test_check_without_a_gpu_lists_the_kernels_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("URLS_TO_GPT2_KERNELS", str(tmp_path))
    assert run_main(main, "check") == 0 and run_main(main, "check", "--measure") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[2 : 2 + len(KERNELS)]] == [[name, "no", "-", "no"] for name in KERNELS]


@pytest.mark.gpu
def test_check_tests_each_kernel_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("URLS_TO_GPT2_KERNELS", str(CACHE))
    if reason := library.prepare():
        pytest.skip(reason)
    assert main(["check"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:4] for row in rows] == [[name, "yes", "yes", "no"] for name in KERNELS]
