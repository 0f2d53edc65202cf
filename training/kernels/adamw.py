"""The optimiser's passes over all parameters: the gradients' sum of squares, and AdamW.

    total = sum_of_squares(gradients)  # on the device, one pass
    factor = (clip / total.sqrt()).clamp(max=1.0).float()
    hyper = Hyper(rate=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, step=1)
    adamw_(parameters, gradients, exp_avgs, exp_avg_sqs, [0.1] * len(parameters), factor, hyper)

The kernels take thousands of tensors in one launch: each is cut into chunks, and a table in device
memory says which chunk is whose. Sums have a fixed order, so results repeat bitwise. No compiled
graph holds them, so they are no operators of PyTorch's.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from training.kernels import library
from training.kernels.library import dtype_code

CHUNK = 65_536  # elements per block, as in csrc/adamw.cu
_ACCURATE = 1 << 14  # elements of a float32 norm on a CPU


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all elements, float64, shape (); Inf or NaN if one is not finite.

    All tensors have one type and device.
    """
    if not tensors or not library.selected("sum_of_squares", tensors[0]):
        return reference_sum_of_squares(tensors)
    device, dtype = tensors[0].device, tensors[0].dtype
    tensors = [tensor.detach().contiguous() for tensor in tensors]
    assert _fit(tensors, device, dtype)
    sizes, chunks = _chunks(tuple(tensor.numel() for tensor in tensors), device)
    partial = torch.empty(len(chunks), device=device)
    out = torch.empty((), dtype=torch.float64, device=device)
    library.call(
        "sum_of_squares", device,
        _table(tuple(tensor.data_ptr() for tensor in tensors), torch.int64, device),
        sizes, chunks, partial, out, len(chunks), dtype_code(dtype),
    )  # fmt: skip
    return out


def reference_sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """`sum_of_squares` in plain PyTorch.

    On CPUs torch accumulates a float32 norm in a few running sums, which is 1e-3 too low at the 38
    million elements of a GPT-2 embedding. Norms of 2^14 elements are accurate to 2e-8; their
    squares are summed in float64. This costs 50 ms at 124M parameters on two cores; float64
    throughout would cost half a second. GPUs sum in a tree, which is accurate enough.
    """
    parts = [part for tensor in tensors for part in _parts(tensor.float()) if part.numel()]
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(parts)).double().square().sum()


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(tensor.reshape(-1), _ACCURATE) if tensor.device.type == "cpu" else (tensor,)


class Hyper(NamedTuple):
    """The numbers of a step that all tensors share."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    step: int  # counts from 1


Tensors = Sequence[Tensor]


@torch.no_grad()
def adamw_(
    parameters: Tensors, gradients: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors,
    weight_decays: Sequence[float], factor: Tensor, hyper: Hyper,
) -> None:  # fmt: skip
    """One step of AdamW (Loshchilov and Hutter 2019) in place, with the gradients times `factor`.

    Parameters, moments and `factor`, (), are float32. Gradients are float32 or 16-bit, all of one
    type, and are not changed. Each tensor has its own weight decay.
    """
    if not parameters or not library.selected("adamw", parameters[0]):
        reference_adamw_(parameters, gradients, exp_avgs, exp_avg_sqs, weight_decays, factor, hyper)
        return
    device, dtype = parameters[0].device, gradients[0].dtype
    gradients = [gradient.contiguous() for gradient in gradients]
    assert _fit([*parameters, *exp_avgs, *exp_avg_sqs, factor], device, torch.float32)
    assert _fit(gradients, device, dtype)
    rate, beta1, beta2, eps, step = hyper
    sizes, chunks = _chunks(tuple(parameter.numel() for parameter in parameters), device)
    pointers = tuple(tensor.data_ptr() for tensor in (*parameters, *gradients, *exp_avgs, *exp_avg_sqs))
    library.call(
        "adamw", device,
        _table(pointers, torch.int64, device), sizes, chunks,
        _table(tuple(weight_decays), torch.float32, device), factor, len(parameters), len(chunks),
        rate, rate / (1 - beta1**step), beta1, 1 - beta1, beta2, 1 - beta2, 1 / math.sqrt(1 - beta2**step), eps,
        dtype_code(dtype),
    )  # fmt: skip


@torch.no_grad()
def reference_adamw_(
    parameters: Tensors, gradients: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors,
    weight_decays: Sequence[float], factor: Tensor, hyper: Hyper,
) -> None:  # fmt: skip
    """`adamw_` in plain PyTorch."""
    rate, beta1, beta2, eps, step = hyper
    size, root2 = rate / (1 - beta1**step), math.sqrt(1 - beta2**step)
    rows = zip(parameters, gradients, exp_avgs, exp_avg_sqs, weight_decays, strict=True)
    for parameter, gradient, exp_avg, exp_avg_sq, weight_decay in rows:
        gradient = gradient.to(parameter.dtype) * factor
        parameter.mul_(1 - rate * weight_decay)
        exp_avg.mul_(beta1).add_(gradient, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        parameter.addcdiv_(exp_avg, (exp_avg_sq.sqrt() / root2).add_(eps), value=-size)


# ----------------------------------------------------------------------------- tables of tensors


def _fit(tensors: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can read these tensors by address."""
    return all(each.device == device and each.dtype == dtype and each.is_contiguous() for each in tensors)


# Tables are functions of plain numbers: a step that finds the tensors in place copies nothing


@lru_cache(maxsize=32)
def _table(values: tuple[float | int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    table = torch.tensor(values, dtype=dtype)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table  # waits for nothing


@lru_cache(maxsize=16)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The sizes, (tensors,), and each chunk's tensor and first element, (chunks, 2), int64."""
    starts = ((index, first) for index, size in enumerate(sizes) for first in range(0, size, CHUNK))
    chunks = _table(tuple(chain.from_iterable(starts)), torch.int64, device)
    return _table(sizes, torch.int64, device), chunks.view(-1, 2)
