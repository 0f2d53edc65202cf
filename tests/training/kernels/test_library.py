"""Loading and calling the kernels: what becomes of arguments and errors, and of a machine that cannot have them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.errors import KernelError
from tests.training.kernels.helpers import write_nvcc
from training.kernels import library
from training.kernels.library import call, dtype_code

CPU = torch.device("cpu")


@pytest.fixture
def unprepared() -> Iterator[None]:
    library.prepare.cache_clear()
    yield
    library.prepare.cache_clear()


def test_a_wrong_call_is_refused_before_it_can_do_harm(host_library: Path) -> None:
    with pytest.raises(KernelError, match="cross_entropy_statistics"):
        call("cross_entropy_statistics", CPU)  # no library
    library.use_host_library(host_library)
    try:
        with pytest.raises(KernelError, match=r"\(3, 2\)"):  # not contiguous
            call("cross_entropy_statistics", CPU, torch.zeros(2, 3).T)
        with pytest.raises(KernelError, match="float64"):
            dtype_code(torch.float64)
        sizes = (1, 4, 0, 5)  # more rows than columns
        arguments = (torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 3))
        with pytest.raises(KernelError, match="cudaErrorInvalidValue"):
            call("cross_entropy_statistics", CPU, *arguments, *sizes, dtype_code(torch.float32))
    finally:
        library.use_host_library(None)


def test_a_failed_build_is_one_warning(
    unprepared: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_nvcc(tmp_path, monkeypatch, "echo 'x.cu(1): error: no such header'\nexit 1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "x.cu(1)" in library.prepare()
    assert library.prepare() == library.prepare()
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.startswith("warning: ") and "x.cu(1)" in printed


def test_a_library_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_text("not a library")
    with pytest.raises(KernelError, match=r"kernels\.so"):
        library.use_library(tmp_path / "kernels.so")
