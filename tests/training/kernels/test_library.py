"""Loading and calling the kernels: what becomes of arguments and errors, when a kernel is used, and the fallback."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import KernelError
from training.kernels import library
from training.kernels.library import call, dtype_code, select, selected

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_libraries", {}), ("_devices", frozenset()), ("_selected", frozenset())):
        monkeypatch.setattr(library, name, value)
    library.prepare.cache_clear()


class Recorder:
    """A library whose launchers keep their arguments."""

    def __init__(self, result: int = 0) -> None:
        self.arguments: list[Any] = []
        self.result = result

    def kernels_device(self, index: int) -> int:
        self.device = index
        return 0

    def launcher(self, *arguments: Any) -> int:
        self.arguments = list(arguments)
        return self.result


def test_arguments_become_what_a_launcher_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setitem(library._libraries, "cpu", recorder)  # type: ignore[arg-type]
    tensor = torch.zeros(3)
    call("launcher", CPU, tensor, None, 2**40, True, 0.5, dtype_code(torch.bfloat16))
    address, nothing, size, flag, number, code, stream = recorder.arguments
    assert isinstance(address, ctypes.c_void_p) and address.value == tensor.data_ptr()
    assert nothing is None and stream is None
    assert isinstance(size, ctypes.c_int64) and size.value == 2**40
    assert isinstance(flag, ctypes.c_int64) and flag.value == 1
    assert isinstance(number, ctypes.c_float) and number.value == 0.5
    assert isinstance(code, ctypes.c_int) and code.value == 2


def test_a_launcher_gets_the_current_stream_and_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, entered = Recorder(), []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        entered.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: entered[-1].index)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=100 + device.index))
    monkeypatch.setitem(library._libraries, "cuda", recorder)  # type: ignore[arg-type]
    call("launcher", torch.device("cuda", 3), 7)
    assert recorder.device == 3 and [argument.value for argument in recorder.arguments] == [7, 103]


def test_an_error_has_cudas_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library._libraries, "cpu", Recorder(700))  # type: ignore[arg-type]
    monkeypatch.setattr(library, "error_name", lambda library, error: f"cudaError{error}")
    with pytest.raises(KernelError, match="launcher: cudaError700"):
        call("launcher", CPU)


def test_a_wrong_call_is_refused_before_it_can_do_harm(host_library: Path) -> None:
    with pytest.raises(KernelError, match="cross_entropy_statistics: no kernels are loaded for cpu"):
        call("cross_entropy_statistics", CPU)
    library.use_host_library(host_library)
    with pytest.raises(KernelError, match=r"launcher: a tensor of shape \(3, 2\) is not contiguous"):
        call("launcher", CPU, torch.zeros(2, 3).T)
    with pytest.raises(KernelError, match=r"no kernel takes torch\.float64"):
        dtype_code(torch.float64)
    sizes = (1, 4, 0, 5)  # more rows than columns
    arguments = (torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 3))
    with pytest.raises(KernelError, match="cross_entropy_statistics: cudaErrorInvalidValue"):
        call("cross_entropy_statistics", CPU, *arguments, *sizes, dtype_code(torch.float32))


def test_a_kernel_is_used_where_it_is_selected_and_a_library_is(host_library: Path) -> None:
    tensor = torch.zeros(2)
    select(["a"])
    assert not selected("a", tensor)
    library.use_host_library(host_library)
    assert selected("a", tensor) and not selected("b", tensor)
    assert not selected("a", tensor.double()) and not selected("a", tensor.to("meta"))
    select(())
    assert not selected("a", tensor)


@pytest.mark.filterwarnings("ignore")  # the compiler looks at everything, deprecated things too
def test_compiled_code_follows_the_selection_without_a_graph_break(host_library: Path) -> None:
    def function(x: Tensor) -> Tensor:
        return x + 1 if selected("a", x) else x - 1

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    x = torch.zeros(2)
    library.use_host_library(host_library)
    assert compiled(x).tolist() == [-1, -1]
    select(["a"])
    assert compiled(x).tolist() == [1, 1]
    select(["b"])
    assert compiled(x).tolist() == [-1, -1]


def test_without_a_gpu_nothing_is_built_and_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert library.prepare() == "no CUDA device"
    assert capsys.readouterr() == ("", "")


def test_a_failed_build_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "bin/nvcc"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\ncase $1 in --version) echo 1; exit;; --list-gpu-arch) echo compute_90; exit;; esac\n"
        "echo 'x.cu(1): error: no such header'\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("URLS_TO_GPT2_KERNELS", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "x.cu(1): error: no such header" in library.prepare()
    assert library.prepare() == library.prepare()
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.startswith("warning: no CUDA kernels, PyTorch's operations are used")
    assert "x.cu(1): error: no such header" in printed


def test_a_library_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_text("not a library")
    with pytest.raises(KernelError, match=r"kernels\.so: cannot be loaded"):
        library.use_library(tmp_path / "kernels.so")
