"""Loading and calling kernels: arguments, errors, machines without them; the command `build`."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.errors import KernelError
from tests.helpers import run_main
from tests.training.kernels.helpers import write_nvcc
from training.kernels import library
from training.kernels.__main__ import main
from training.kernels.build import FOLDER_VARIABLE, build, nvcc
from training.kernels.library import call, dtype_code

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def unprepared() -> Iterator[None]:
    library.prepare.cache_clear()
    yield
    library.prepare.cache_clear()


def test_a_wrong_call_is_refused_before_it_can_do_harm(host_library: Path) -> None:
    with pytest.raises(KernelError, match="bias_gelu"):
        call("bias_gelu", CPU)  # no library
    library.use_host_library(host_library)
    try:
        with pytest.raises(KernelError, match=r"\(3, 2\)"):  # not contiguous
            call("bias_gelu", CPU, torch.zeros(2, 3).T)
        with pytest.raises(KernelError, match="float64"):
            dtype_code(torch.float64)
        arguments = (torch.zeros(1, 4), torch.zeros(4), torch.zeros(1, 4), 1, 4)
        with pytest.raises(KernelError, match="cudaErrorInvalidValue"):
            call("bias_gelu", CPU, *arguments, ctypes.c_int(9))  # no such type
    finally:
        library.use_host_library(None)


UNFIT = """
extern "C" int kernels_device(int) { return 0; }
extern "C" int kernels_probe(void*) { return 209; }
extern "C" const char* kernels_error(int) { return "cudaErrorNoKernelImageForDevice"; }
"""


def test_libraries_that_do_not_run_are_passed_over_and_then_one_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_library: Path
) -> None:
    for name, value in (("is_available", True), ("get_device_capability", (9, 0)), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(library, "_libraries", {})
    monkeypatch.setattr(library, "_devices", frozenset())
    (tmp_path / "unfit.cpp").write_text(UNFIT)
    unfit = tmp_path / "unfit.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(unfit), str(tmp_path / "unfit.cpp")], check=True)

    def write(name: str, gives: Path) -> Path:
        """An nvcc that gives this library; returns the list of its calls."""
        calls = write_nvcc(tmp_path / name, monkeypatch, f'cp {gives} "$2"; exit')
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
        library.prepare.cache_clear()
        return calls

    write("first", tmp_path / "unfit.cpp")
    broken = build(nvcc(90))  # no library at all
    write("second", unfit)
    missing = library.prepare(report=False)
    assert str(broken) in missing and missing.count("cudaErrorNoKernelImageForDevice") == 1
    assert not library.loaded(torch.device("cuda"))
    calls = write("third", host_library)
    assert library.prepare() == "" and len(calls.read_text().splitlines()) == 1
    calls = write("fourth", unfit)
    build(nvcc())  # the newest, for every device
    assert library.prepare() == "" and len(calls.read_text().splitlines()) == 1  # the third one's is found
    assert library.loaded(torch.device("cuda"))


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
