"""The compiled kernels: loading them, calling a launcher, and which of them are selected.

    library.call("bias_gelu", x.device, x, bias, out, rows_of(x), x.shape[-1], dtype_code(x.dtype))

A launcher is a C function of csrc/ whose last argument is a stream and whose result is a
cudaError_t. A kernel is used if it is selected and its tensor's device has a library; else the op's
reference runs.
"""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from common.console import warn
from common.errors import KernelError
from training.kernels.build import build, find_libraries, nvcc

KERNELS = ("add_dropout_norm", "bias_gelu", "pack_heads", "sum_of_squares", "adamw")  # as their ops ask for them

# Blocks of a sum over rows: five per SM of an H100 (132), which run at once. The same on every
# device, so that the order of a sum does not depend on it.
_BLOCKS = 660
_TILE_WIDTH, _TILE_HEIGHT = 256, 8  # of columns.cuh, where a thread takes eight columns

_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as DISPATCH in csrc/common.cuh

_libraries: dict[str, ctypes.CDLL] = {}
_selected: frozenset[str] = frozenset()
_devices: frozenset[str] = frozenset()  # the keys of _libraries; torch.compile reads strings, not libraries


def dtype_code(dtype: torch.dtype) -> ctypes.c_int:
    """The launchers' code for a dtype. Raises KernelError for one that no kernel takes."""
    if dtype not in _DTYPE_CODES:
        raise KernelError(f"no kernel takes {dtype}; they take float32, float16 and bfloat16")
    return ctypes.c_int(_DTYPE_CODES[dtype])


def rows_of(x: Tensor) -> int:
    """The rows of (…, C)."""
    return x.numel() // x.shape[-1] if x.numel() else 0


def strips(rows: int, columns: int) -> int:
    """The number of blocks in a sum over rows, which is that of its partial sums."""
    tiles = max(1, -(-columns // _TILE_WIDTH))
    return min(-(-rows // _TILE_HEIGHT), max(1, _BLOCKS // tiles))


def fit_columns(x: Tensor, *parameters: Tensor) -> bool:
    """Whether biases or weights have the size of x's last dimension, and its type."""
    return all(parameter.shape == x.shape[-1:] and parameter.dtype == x.dtype for parameter in parameters)


def empty_like(tensor: Tensor) -> Tensor:
    """A contiguous tensor of the same shape and type, for a launcher's result."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def call(name: str, device: torch.device, *arguments: Tensor | int | float | ctypes.c_int | None) -> None:
    """Call a launcher on the current stream of a device.

    A tensor becomes its address and must be contiguous, None a null pointer, an int (or bool)
    int64_t, a float float. Raises KernelError with the name of the CUDA error.
    """
    library = _libraries.get(device.type)
    if library is None:
        raise KernelError(f"{name}: no kernels are loaded for {device.type}")
    converted = [_convert(name, argument) for argument in arguments]
    if device.type == "cuda":
        with torch.cuda.device(device):
            library.kernels_device(torch.cuda.current_device())
            stream = torch.cuda.current_stream(device).cuda_stream
            error = getattr(library, name)(*converted, ctypes.c_void_p(stream))
    else:
        error = getattr(library, name)(*converted, None)
    if error != 0:
        raise KernelError(f"{name}: {error_name(library, error)}")


def error_name(library: ctypes.CDLL, error: int) -> str:
    """The name of a cudaError_t, such as cudaErrorInvalidValue."""
    library.kernels_error.restype = ctypes.c_char_p
    return str(library.kernels_error(error).decode())


def select(names: Iterable[str]) -> None:
    """Use these kernels and no others from now on; a compiled model is compiled again."""
    global _selected
    _selected = frozenset(names)


@contextmanager
def using(names: Iterable[str]) -> Iterator[None]:
    """`select` inside `with`."""
    before = _selected
    select(names)
    try:
        yield
    finally:
        select(before)


def selected(name: str, tensor: Tensor) -> bool:
    """Whether the kernel `name` is used for this tensor; a constant for torch.compile."""
    return name in _selected and tensor.device.type in _devices and tensor.dtype in _DTYPE_CODES


def loaded(device: torch.device) -> bool:
    """Whether kernels are loaded for this device."""
    return device.type in _devices


def capability() -> int:
    """The compute capability of the current CUDA device: 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@cache
def prepare(report: bool = True) -> str:
    """Load the kernels for the current CUDA device, or build them; returns "", or the failure.

    Tried once per process: each library in the cache until one runs, then a build. `report`: warn
    of a failure, unless there is no device; then every op runs its reference.
    """
    if not torch.cuda.is_available():
        return "no CUDA device"
    number, faults = capability(), dict[str, None]()
    for path in (*find_libraries(number), None):
        try:
            use_library(path or build(nvcc(number)))
            return ""
        except KernelError as error:
            faults[str(error)] = None  # once, where a build finds a library that has failed
    if report:
        warn(f"no CUDA kernels, PyTorch's operations are used instead: {'; '.join(faults)}")
    return "; ".join(faults)


def use_library(path: Path) -> None:
    """Load the kernels that `build` compiled for CUDA devices.

    Raises KernelError if the file cannot be loaded, or does not run on the current device.
    """
    library = _load(path)
    error = library.kernels_device(torch.cuda.current_device()) or library.kernels_probe(None)
    if error != 0:
        raise KernelError(f"{path}: kernels do not run on this device: {error_name(library, error)}")
    _use("cuda", library)


def use_host_library(path: Path | None) -> None:
    """Load kernels that were compiled for the CPU by csrc/host.h, for tests; None: forget them."""
    _use("cpu", None if path is None else _load(path))


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"{path}: cannot be loaded, remove it to build it again: {error}") from None


def _use(device: str, library: ctypes.CDLL | None) -> None:
    global _devices
    _libraries.pop(device, None)
    if library is not None:
        _libraries[device] = library
    _devices = frozenset(_libraries)


def _convert(name: str, argument: Tensor | int | float | ctypes.c_int | None) -> object:
    if isinstance(argument, Tensor):
        if not argument.is_contiguous():
            raise KernelError(f"{name}: a tensor of shape {tuple(argument.shape)} is not contiguous")
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    return ctypes.c_float(argument) if isinstance(argument, float) else argument
