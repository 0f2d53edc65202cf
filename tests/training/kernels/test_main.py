"""The command: what `build` prints and does, and `check` on a machine without a GPU and on one with it."""

from pathlib import Path

import pytest
import torch

from common.errors import KernelError
from tests.conftest import Command
from tests.helpers import assert_one_line_error
from tests.training.kernels.conftest import CACHE
from training.kernels import library
from training.kernels.__main__ import main
from training.kernels.choice import KERNELS


def fake_nvcc(
    folder: Path, monkeypatch: pytest.MonkeyPatch, body: str = 'while [ "$1" != -o ]; do shift; done; : > "$2"'
) -> None:
    script = folder / "bin/nvcc"
    script.parent.mkdir()
    answers = "case $1 in --version) echo 1; exit;; --list-gpu-arch) echo compute_80 compute_90; exit;; esac"
    script.write_text(f"#!/bin/sh\n{answers}\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(folder))
    monkeypatch.setenv("URLS_TO_GPT2_KERNELS", str(folder / "cache"))


def test_build_compiles_once_and_says_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_nvcc(tmp_path, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["build"]) == 0
    (library,) = (tmp_path / "cache").glob("*.so")
    assert capsys.readouterr().out == f"{library}: compiled in 0 s, for sm_80, sm_90, compute_90\n"
    assert main(["build"]) == 0
    assert capsys.readouterr().out == f"{library}: was there already, for sm_80, sm_90, compute_90\n"
    assert main(["build", "--architectures", "90"]) == 0
    assert capsys.readouterr().out.endswith(", for sm_90\n")


def test_a_build_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    fake_nvcc(tmp_path, monkeypatch, "echo 'x.cu(7): error: no such type'; exit 1")
    assert_one_line_error(command("training.kernels", "build"), "x.cu(7): error: no such type")
    with pytest.raises(KernelError, match="does not compile for sm_70"):
        main(["build", "--architectures", "70"])


def test_check_without_a_gpu_lists_the_kernels_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("URLS_TO_GPT2_KERNELS", str(tmp_path))
    library.prepare.cache_clear()
    try:
        assert main(["check"]) == 0 and main(["check", "--measure"]) == 0
    finally:
        library.prepare.cache_clear()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "device: no GPU: every op runs in PyTorch"
    assert [line.split()[0] for line in lines[2 : 2 + len(KERNELS)]] == list(KERNELS)
    assert all(line.split()[1:4] == ["no", "-", "no"] for line in lines[2 : 2 + len(KERNELS)])


@pytest.mark.gpu
def test_check_tests_each_kernel_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("URLS_TO_GPT2_KERNELS", str(CACHE))
    library.prepare.cache_clear()
    if reason := library.prepare():
        pytest.skip(reason)
    assert main(["check"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:4] for row in rows] == [[name, "yes", "yes", "no"] for name in KERNELS]
