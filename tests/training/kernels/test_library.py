"""Loading and calling the kernels: what becomes of arguments and errors, and of a machine that cannot have them."""

import ctypes
from pathlib import Path

import pytest
import torch

from common.errors import KernelError
from training.kernels import library
from training.kernels.library import call, dtype_code

CPU = torch.device("cpu")


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
