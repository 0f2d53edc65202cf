"""The layer that runs kernels on the CPU: it gives what CUDA would, and shows what CUDA would punish."""

import ctypes
import subprocess

import numpy as np
import pytest
import torch

from common.errors import KernelError
from training.kernels.build import SOURCES, host_compiler

SOURCE = """
#include "common.cuh"

__global__ void reverse(float* data, bool barrier) {  // right only with a barrier between the two
    __shared__ float shared[96];
    shared[threadIdx.x] = data[threadIdx.x];
    if (barrier) __syncthreads();
    data[threadIdx.x] = shared[95 - threadIdx.x];
}
__global__ void some_return(float* data, bool whole_warps) {
    if (threadIdx.x >= (whole_warps ? 64 : 40)) return;
    data[threadIdx.x] = warp_sum(1.0f);
}
__global__ void some_wait(float* data) {
    if (threadIdx.x % 2) __syncthreads();
    data[threadIdx.x] = 1.0f;
}
extern "C" {
int run_reverse(float* data, int barrier) { return launch(reverse, 1, 96, 0, nullptr, data, barrier != 0); }
int run_return(float* data, int whole_warps) { return launch(some_return, 1, 96, 0, nullptr, data, whole_warps != 0); }
int run_wait(float* data) { return launch(some_wait, 1, 64, 0, nullptr, data); }
void order(int reversed) { host::reversed = reversed; }
void from_half(const __half* in, float* out, int n) { for (int i = 0; i < n; ++i) out[i] = to_float(in[i]); }
void from_bfloat16(const __nv_bfloat16* in, float* out, int n) { for (int i = 0; i < n; ++i) out[i] = to_float(in[i]); }
void to_half(const float* in, __half* out, int n) { for (int i = 0; i < n; ++i) from_float(in[i], out[i]); }
void to_bfloat16(const float* in, __nv_bfloat16* out, int n) { for (int i = 0; i < n; ++i) from_float(in[i], out[i]); }
}
"""
LAUNCH_FAILURE = 719


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        compiler = host_compiler()
    except KernelError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("host")
    (folder / "host.cu").write_text(SOURCE)
    command = [compiler.path, *compiler.flags, "-O0", f"-I{SOURCES}", "-o", folder / "host.so", folder / "host.cu"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "host.so"))


def pointer(array: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def reversed_by(host: ctypes.CDLL, *, barrier: bool, order: int) -> bool:
    values = np.random.default_rng(2 * order + barrier).random(96, dtype=np.float32)
    data = values.copy()
    host.order(order)
    assert host.run_reverse(pointer(data), int(barrier)) == 0
    host.order(0)
    return bool((data == values[::-1]).all())


def test_barriers_hold_and_a_missing_one_shows(host: ctypes.CDLL) -> None:
    assert reversed_by(host, barrier=True, order=0) and reversed_by(host, barrier=True, order=1)
    assert not reversed_by(host, barrier=False, order=0)
    assert not reversed_by(host, barrier=False, order=1)


def test_what_would_hang_on_a_gpu_is_an_error_and_the_next_launch_works(host: ctypes.CDLL) -> None:
    data = np.zeros(96, dtype=np.float32)
    assert host.run_return(pointer(data), 0) == LAUNCH_FAILURE
    assert host.run_wait(pointer(data)) == LAUNCH_FAILURE
    assert host.run_return(pointer(data), 1) == 0
    assert data.tolist() == [32] * 64 + [0] * 32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_types_convert_as_in_pytorch(host: ctypes.CDLL, dtype: torch.dtype) -> None:
    name = {torch.float16: "half", torch.bfloat16: "bfloat16"}[dtype]
    every = torch.arange(2**16).to(torch.uint16).view(dtype)
    wide = torch.empty(2**16)
    getattr(host, f"from_{name}")(ctypes.c_void_p(every.data_ptr()), ctypes.c_void_p(wide.data_ptr()), 2**16)
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)

    # each value, the middle to the next, and both neighbours of the middle: rounding to even, overflow, subnormals
    finite = every[every.isfinite()].float().sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    above = torch.nextafter(middle, torch.tensor(torch.inf))
    below = torch.nextafter(middle, torch.tensor(-torch.inf))
    extremes = torch.tensor([65519.9, 65520, 1e38, 3.4e38, torch.inf, -torch.inf, torch.nan, 1e-45, -0.0])
    values = torch.cat([finite, middle, above, below, extremes])
    narrow = torch.empty(len(values), dtype=dtype)
    getattr(host, f"to_{name}")(ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(narrow.data_ptr()), len(values))
    torch.testing.assert_close(narrow, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert (narrow.signbit() == values.signbit())[~values.isnan()].all()
