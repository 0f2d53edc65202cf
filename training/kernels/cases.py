"""Every kernel at work on the shapes of a run: what `check` tests and `choice.measure` times.

for case in cases(Shapes(samples=8), torch.device("cuda")):
    print(case.kernel, verify(case) or "agrees with PyTorch")
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import KernelError
from training.kernels import library
from training.kernels.cross_entropy import backward_, statistics
from training.kernels.softmax import causal_softmax

_RATES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far a result may be from PyTorch's in the same dtype, by the largest value: a few roundings."""


@dataclass(frozen=True)
class Shapes:
    """What one process of a run gives the kernels; the defaults are GPT-2 345M's at micro-batch 8."""

    samples: int = 8
    """Of a micro-batch."""
    seq_len: int = 1024
    n_embd: int = 1024
    n_head: int = 16
    """Heads of this process."""
    vocabulary: int = 50257
    """Rows of the embedding that this process holds, without padding."""
    padded_vocabulary: int = 50304
    dropout: float = 0.1
    dtype: str = "bfloat16"
    """Of activations and logits."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[self.dtype]


@dataclass(frozen=True)
class Case:
    """One op on one shape, called by its public name: whether its kernel runs is a matter of `library.select`."""

    kernel: str
    make: Callable[[], tuple[Tensor, ...]]
    """New arguments, the same each time; those that require a gradient are differentiated."""
    forward: Callable[..., tuple[Tensor, ...]]
    bytes: int
    """What forward and backward must read and write at least."""
    peer: Callable[..., object] | None = None
    """What PyTorch has for the same arguments, where that is faster than the op's reference."""


def cases(shapes: Shapes, device: torch.device) -> Iterator[Case]:
    """One case per kernel."""
    yield _cross_entropy(shapes, device)
    yield _causal_softmax(shapes, device)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _cross_entropy(shapes: Shapes, device: torch.device) -> Case:
    tokens, columns, rows = shapes.samples * shapes.seq_len, shapes.padded_vocabulary, shapes.vocabulary

    def make() -> tuple[Tensor, ...]:
        generator = _generator(device)
        logits = torch.randn(tokens, columns, generator=generator, device=device, dtype=shapes.torch_dtype)
        targets = torch.randint(rows, (tokens,), generator=generator, device=device)
        return logits, targets, torch.full((tokens,), 1 / tokens, device=device)

    def forward(logits: Tensor, targets: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        found = statistics(logits, targets, 0, rows)
        log_sum_exp = found[:, 0] + found[:, 1].log()
        backward_(logits, targets, log_sum_exp, gradient, 0, rows)
        return log_sum_exp - found[:, 2], logits

    # read, then read and written
    return Case("cross_entropy", make, forward, 3 * tokens * columns * shapes.torch_dtype.itemsize)


def _causal_softmax(shapes: Shapes, device: torch.device) -> Case:
    form = (shapes.samples, shapes.n_head, shapes.seq_len, shapes.seq_len)
    scale = (shapes.n_embd // shapes.n_head) ** -0.5

    def make() -> tuple[Tensor, ...]:
        scores = torch.randn(form, generator=_generator(device), device=device, dtype=shapes.torch_dtype)
        return (scores.requires_grad_(),)

    def forward(scores: Tensor) -> tuple[Tensor, ...]:
        return (causal_softmax(scores, scale),)

    size = form[0] * form[1] * form[2] * form[3] * shapes.torch_dtype.itemsize
    # half of the scores read, all probabilities written; half of two tensors read, all of one written
    return Case("causal_softmax", make, forward, int(3.5 * size))


def runner(case: Case, forward: Callable[..., tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """A function that runs forward and backward once: the outputs, then the gradients. Inputs are reused."""
    inputs = case.make()
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    slopes: list[Tensor] = []

    def run() -> tuple[Tensor, ...]:
        outputs = forward(*inputs)
        if not leaves:
            return outputs
        if not slopes:
            slopes.extend(
                torch.randn(o.shape, generator=_generator(o.device), device=o.device, dtype=o.dtype) for o in outputs
            )
        return (*(output.detach() for output in outputs), *torch.autograd.grad(outputs, leaves, slopes))

    return run


def verify(case: Case) -> str:
    """Run the kernel and PyTorch on the same arguments; returns "", or how they differ. Raises KernelError."""
    with library.using([case.kernel]):
        found = runner(case, case.forward)()
    with library.using(()):
        expected = runner(case, case.forward)()
    if not library.loaded(found[0].device):
        raise KernelError(f"{case.kernel}: no kernels are loaded for {found[0].device.type}")
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        error = (ours.double() - theirs.double()).abs().max()
        size = theirs.double().abs().max()
        if not error <= _RATES[ours.dtype] * size:  # NaN, too
            return (
                f"result {index} differs from PyTorch's by {float(error):.2g}; its largest value is {float(size):.2g}"
            )
    return ""
