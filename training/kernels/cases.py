"""One case per kernel on a run's shapes, for `check`, the choice of kernels and benchmarks.gpu.

for case in cases(Shapes(samples=8), torch.device("cuda")):
    verify(case)  # KernelError, if the kernel does not agree with PyTorch
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from common.errors import KernelError
from training.kernels import library
from training.kernels.adamw import Hyper, adamw_, sum_of_squares
from training.kernels.ops import bias_gelu, split_heads
from training.kernels.residual import add_dropout_norm
from training.tensors import Sizes, all_names, leaf_of

_RATES = {torch.float64: 1e-5, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far a result may be from PyTorch's, by the largest value: a few roundings of each dtype."""


@dataclass(frozen=True)
class Shapes:
    """The shapes that the kernels get in one process; by default GPT-2 345M's at micro-batch 8."""

    samples: int = 8  # of a micro-batch
    seq_len: int = 1024
    n_layer: int = 24
    n_embd: int = 1024
    vocabulary: int = 50304  # rows of the embedding that this process holds, padding included
    dropout: float = 0.1
    dtype: str = "bfloat16"  # of activations and the residual stream
    tensor: int = 1  # ranks that share a layer's matrices
    shards: int = 1  # ranks that share the parameters between steps

    def parameters(self) -> list[int]:
        """The size of what this process holds of every parameter of the model."""
        sizes = Sizes(self.n_embd, 4 * self.n_embd, self.seq_len, self.vocabulary * self.tensor)
        leaves = [leaf_of(name) for name in all_names(self.n_layer)]
        ranks = [self.shards * (1 if leaf.split is None else self.tensor) for leaf in leaves]
        return [-(-math.prod(leaf.shape(sizes)) // share) for leaf, share in zip(leaves, ranks, strict=True)]


@dataclass(frozen=True)
class Case:
    """One op on one shape, called by its public name; `library.select` chooses its kernel."""

    kernel: str
    make: Callable[[], list[Any]]  # new arguments, the same each time; leaves among them are differentiated
    forward: Callable[..., tuple[Tensor, ...]]
    bytes: int  # that forward and backward must read and write at least
    plain: Callable[..., tuple[Tensor, ...]] | None = None
    """PyTorch's own function, if the op's reference is slower: a loop, or the kernel's mask."""
    part: str = "block"  # of a step: `block` and `loss` are compiled graphs, `optimizer` is not


def cases(shapes: Shapes, device: torch.device) -> Iterator[Case]:
    """One case per kernel, in the order of `library.KERNELS`."""
    for make in (_add_dropout_norm, _bias_gelu, _pack_heads, _sum_of_squares, _adamw):
        yield make(shapes, device)


def _normal(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...], leaves: bool = False) -> list[Tensor]:
    """Tensors of normal numbers, the same for the same calls; `leaves` require a gradient."""
    generator = torch.Generator(device).manual_seed(0)
    drawn = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes)
    return [tensor.requires_grad_(leaves) for tensor in drawn]


def _add_dropout_norm(shapes: Shapes, device: torch.device) -> Case:
    form, dtype = (shapes.samples, shapes.seq_len, shapes.n_embd), getattr(torch, shapes.dtype)

    make = partial(_normal, device, dtype, form, form, form[-1:], form[-1:], leaves=True)
    seed = torch.tensor([1234, 0], device=device)

    def forward(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return add_dropout_norm(x, branch, shapes.dropout, seed, weight, bias, 1e-5)

    def plain(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        x = x + F.dropout(branch, shapes.dropout)
        return x, F.layer_norm(x, weight.shape, weight, bias)

    # x, branch, sum, normed; gradients of sum and normed, sum, gradients of x and branch
    return Case("add_dropout_norm", make, forward, 9 * math.prod(form) * dtype.itemsize, plain=plain)


def _bias_gelu(shapes: Shapes, device: torch.device) -> Case:
    form, dtype = (shapes.samples, shapes.seq_len, 4 * shapes.n_embd // shapes.tensor), getattr(torch, shapes.dtype)
    make = partial(_normal, device, dtype, form, form[-1:], leaves=True)

    # x, result; gradient, x, gradient of x
    count = 5 * math.prod(form) * dtype.itemsize
    return Case("bias_gelu", make, lambda x, bias: (bias_gelu(x, bias),), count)


def _pack_heads(shapes: Shapes, device: torch.device) -> Case:
    width, dtype = 3 * shapes.n_embd // shapes.tensor, getattr(torch, shapes.dtype)
    head_size = math.gcd(64, width // 3)
    form = (shapes.samples, shapes.seq_len, width)
    make = partial(_normal, device, dtype, form, (width,), leaves=True)

    # gradients of q, k and v; gradient of qkv
    count = 2 * math.prod(form) * dtype.itemsize
    return Case("pack_heads", make, lambda qkv, bias: split_heads(qkv, bias, head_size), count)


def _sum_of_squares(shapes: Shapes, device: torch.device) -> Case:
    sizes = shapes.parameters()
    make = partial(_normal, device, torch.float32, *((size,) for size in sizes))

    return Case("sum_of_squares", make, lambda *each: (sum_of_squares(each),), 4 * sum(sizes), part="optimizer")


def _adamw(shapes: Shapes, device: torch.device) -> Case:
    sizes = shapes.parameters()

    factor = torch.tensor(0.5, device=device)

    def make() -> list[list[Tensor]]:
        drawn = _normal(device, torch.float32, *((size,) for size in sizes for _ in range(4)))
        parameters, gradients, first, second = (drawn[which::4] for which in range(4))
        return [parameters, gradients, first, [tensor.square_() for tensor in second]]

    def forward(*lists: list[Tensor]) -> tuple[Tensor, ...]:
        parameters, gradients, first, second = lists
        hyper = Hyper(rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, step=10)
        adamw_(parameters, gradients, first, second, [0.1] * len(sizes), factor, hyper)
        return (*parameters, *first, *second)

    def plain(*lists: list[Tensor]) -> tuple[Tensor, ...]:
        parameters, gradients, first, second = lists
        steps = [torch.tensor(10.0, device=device)] * len(sizes)
        torch._foreach_mul_(gradients, factor)
        torch._fused_adamw_(
            parameters, gradients, first, second, [], steps, lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        return ()

    # parameter, gradient, moments read; parameter, moments written
    return Case("adamw", make, forward, 7 * 4 * sum(sizes), plain, part="optimizer")


def runner(case: Case, forward: Callable[..., tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """A function that runs forward and backward on the same inputs: outputs, then gradients."""
    inputs = case.make()
    leaves = [tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.requires_grad]
    slopes: list[Tensor] = []

    def run() -> tuple[Tensor, ...]:
        outputs = forward(*inputs)
        if not leaves:
            return outputs
        if not slopes:
            slopes.extend(_normal(output.device, output.dtype, output.shape)[0] for output in outputs)
        return (*(output.detach() for output in outputs), *torch.autograd.grad(outputs, leaves, slopes))

    return run


def verify(case: Case) -> None:
    """Run the kernel and PyTorch on the same arguments. Raises KernelError if they differ."""
    with library.using([case.kernel]):
        results = runner(case, case.forward)()
    with library.using(()):
        expected = runner(case, case.forward)()
    if not library.loaded(results[0].device):
        raise KernelError(f"{case.kernel}: no kernels are loaded for {results[0].device.type}")
    for index, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        error = (ours.double() - theirs.double()).abs().max()
        size = theirs.double().abs().max()
        if not error <= _RATES[ours.dtype] * size:  # NaN, too
            raise KernelError(
                f"result {index} differs from PyTorch's by {float(error):.2g}; its largest value is {float(size):.2g}"
            )


# -------------------------------------------------------------------------------------- timing


def time_op(case: Case, ours: bool, least: float = 0.2) -> float:
    """Milliseconds of the op by our kernel, or by the faster of its reference and PyTorch's own."""
    with library.using([case.kernel] if ours else ()):
        ways = [case.forward] if ours or case.plain is None else [case.forward, case.plain]
        return min(milliseconds(runner(case, way), least) for way in ways)


def milliseconds(run: Callable[[], object], least: float = 0.2) -> float:
    """The median of runs over at least `least` seconds, after a warm-up."""
    from torch.utils.benchmark import Timer  # a tenth of a second, which only those who measure need

    for _ in range(3):
        run()
    return 1000 * float(Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=least).median)
