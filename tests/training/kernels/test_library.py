"""Loading and calling the kernels: what becomes of arguments and errors, and of a machine that cannot have them."""

from pathlib import Path

import pytest
import torch

from common.errors import KernelError
from training.kernels import library
from training.kernels.library import call, dtype_code

CPU = torch.device("cpu")


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
