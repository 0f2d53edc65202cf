"""Every kernel test runs the same source on the CPU, through csrc/host.h, and on a GPU if any."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from common.errors import KernelError
from training.kernels import library
from training.kernels.build import FOLDER_VARIABLE, Compiler, build, nvcc

CACHE = Path(os.environ.get(FOLDER_VARIABLE) or Path(tempfile.gettempdir()) / f"urls-to-gpt2-tests-{os.getuid()}")
"""Where the next session finds the libraries."""


HOST_FLAGS = ("-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas")


def host_compiler() -> Compiler:
    """g++, for a library that runs the kernels on the CPU."""
    path = shutil.which("g++")
    if path is None:
        raise KernelError("no g++ on $PATH")
    return Compiler(path, HOST_FLAGS, "host")


def built(find_compiler: Callable[[], Compiler]) -> Path:
    """The library of a compiler, from the tests' own cache; skips the test where there is none."""
    try:
        compiler = find_compiler()
    except KernelError as error:
        pytest.skip(f"the kernels need a compiler, g++ or nvcc: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(CACHE))
        return build(compiler)


@pytest.fixture(scope="session")
def host_library() -> Path:
    """The kernels, compiled for the CPU."""
    return built(host_compiler)


@pytest.fixture(scope="session")
def cuda_library() -> Path:
    """The kernels, compiled for the GPU."""
    return built(lambda: nvcc(library.capability()))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device on which every kernel is selected, and where new tensors are full of NaN."""
    if request.param == "cuda":
        library.use_library(request.getfixturevalue("cuda_library"))
    else:
        library.use_host_library(request.getfixturevalue("host_library"))
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory
    with library.using(library.KERNELS):
        yield torch.device(request.param)
    torch.use_deterministic_algorithms(False)
    run_backwards(False)
    library.use_host_library(None)


def run_backwards(backwards: bool) -> None:
    """Let the threads of a block run from last to first on the CPU: a missing barrier shows."""
    if host := library._libraries.get("cpu"):
        host.kernels_order(backwards)
