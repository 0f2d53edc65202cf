"""Every kernel test runs the same source on the CPU, through csrc/host.h, in two orders of threads, and on a GPU."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.errors import KernelError
from training.kernels import library
from training.kernels.build import FOLDER_VARIABLE, Compiler, build, host_compiler, nvcc

CACHE = Path(os.environ.get(FOLDER_VARIABLE) or Path(tempfile.gettempdir()) / f"urls-to-gpt2-tests-{os.getuid()}")
"""Where the next session finds the libraries."""


def built(compiler: Compiler) -> Path:
    """The library of a compiler, from the tests' own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(CACHE))
        return build(compiler)


class Everything(frozenset[str]):
    """The set that contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


@pytest.fixture(scope="session")
def host_library() -> Path:
    """The kernels, compiled for the CPU."""
    try:
        compiler = host_compiler()
    except KernelError as error:
        pytest.skip(f"{error}: the kernels cannot be compiled for the CPU")
    return built(compiler)


@pytest.fixture(scope="session")
def cuda_library() -> Path:
    """The kernels, compiled for the GPU."""
    try:
        compiler = nvcc([library.capability()])
    except KernelError as error:
        pytest.skip(str(error))
    return built(compiler)


@pytest.fixture(params=["host", "host reversed", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device on which every kernel is selected, and where new tensors are full of NaN."""
    kind, *reversed_order = request.param.split()
    monkeypatch.setattr(library, "_libraries", {})
    monkeypatch.setattr(library, "_devices", frozenset())
    monkeypatch.setattr(library, "_selected", Everything())
    if kind == "cuda":
        library.use_library(request.getfixturevalue("cuda_library"))
    else:
        library.use_host_library(request.getfixturevalue("host_library"))
        library._libraries["cpu"].kernels_order(bool(reversed_order))
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory
    yield torch.device("cpu" if kind == "host" else kind)
    torch.use_deterministic_algorithms(False)
