"""Every kernel test runs the same source on the CPU, through csrc/host.h, in two orders of threads, and on a GPU."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from training.kernels import library

SOURCES = Path(library.__file__).parent / "csrc"


class Everything(frozenset[str]):
    """The set that contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, compiled for the CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++: the kernels cannot be compiled for the CPU")
    path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    flags = ("-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas")
    subprocess.run([compiler, *flags, "-o", path, *sorted(SOURCES.glob("*.cu"))], check=True)
    return path


@pytest.fixture(params=["host", "host reversed", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, host_library: Path
) -> Iterator[torch.device]:
    """A device on which every kernel is selected, and where new tensors are full of NaN."""
    kind, *reversed_order = request.param.split()
    library.use_host_library(host_library)
    library._libraries["cpu"].kernels_order(bool(reversed_order))
    monkeypatch.setattr(library, "_selected", Everything())
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory
    yield torch.device("cpu" if kind == "host" else kind)
    torch.use_deterministic_algorithms(False)
    library.use_host_library(None)
