"""Our kernels beside PyTorch and its compiler, and the forms of the loss beside each other.

A kernel's bytes are what its forward and backward pass must move at least; their rate is compared with a copy's in
the same run. The loss is head and cross-entropy, forward and backward, of 345M at micro-batch 16; its peak includes
neither its inputs nor their gradients.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.clock import forget_peak, median_seconds, peak_gigabytes
from benchmarks.gpu.items import Context, Item, LeftOutError, Row

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TITLE = "Kernels and the loss: milliseconds, and bandwidth beside a copy's"

_TOY = {"samples": 1, "seq_len": 16, "n_layer": 1, "n_embd": 32, "n_head": 2, "vocabulary": 60, "padded_vocabulary": 64}


def items(_toy: bool) -> list[Item]:
    """The kernels are one item: they take turns in one function of the trainer's."""
    return [Item("kernels", "345m, micro-batch 8", 60), Item("kernels", "loss", 25)]


def run(item: Item, context: Context) -> Iterator[Row]:
    """Rows of the kernels, or of the loss."""
    import torch

    device = torch.device("cuda" if context.gpu else "cpu")
    yield from (_losses if item.name == "loss" else _kernels)(context, device)


def _kernels(context: Context, device: "torch.device") -> Iterator[Row]:
    from training.kernels import library
    from training.kernels.cases import Shapes
    from training.kernels.choice import measure

    missing = library.prepare() if context.gpu else ""
    if missing:
        raise LeftOutError(missing)
    fields = {field.name for field in dataclasses.fields(Shapes)}
    shapes: dict[str, Any] = {key: value for key, value in _TOY.items() if key in fields} if context.toy else {}
    for row in measure(Shapes(**shapes), device, compiled=context.gpu)["rows"]:
        rate = row["bytes"] / (row["ours"] / 1000)
        others = [time for time in (row["eager"], row["compile"]) if time is not None]
        yield {
            "kernel": row["kernel"],
            "ours, ms": row["ours"],
            "eager, ms": row["eager"],
            "compiled, ms": row["compile"],
            "GB": row["bytes"] / 1e9,
            "GB/s": rate / 1e9,
            "of a copy %": 100 * rate / context.copy if context.copy and context.gpu else None,
            "speed beside the faster other": min(others) / row["ours"],
        }


def _losses(context: Context, device: "torch.device") -> Iterator[Row]:
    import torch
    from torch.nn import functional as F

    from training.logits_memory import CHUNKS, peak_bytes
    from training.loss import LossHead

    tokens, width, rows, true = (64, 32, 128, 100) if context.toy else (16384, 1024, 50304, 50257)
    x = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(rows, width, device=device)).requires_grad_()
    targets = torch.randint(true, (1, tokens), device=device)
    whole, chunked = LossHead(true), LossHead(true, CHUNKS)
    forms: dict[str, Callable[[], Tensor]] = {
        "whole, compiled": lambda: compiled(x, weight, targets),
        "whole, eager": lambda: whole(x, weight, targets),
        "chunked": lambda: chunked(x, weight, targets),
    }
    compiled = torch.compile(whole, dynamic=False)
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 has it, 2.11 does not
        theirs: Any = F.linear_cross_entropy
        matrix = weight.detach().to(x.dtype).requires_grad_()
        forms["PyTorch's linear_cross_entropy"] = lambda: theirs(x[0], matrix, targets[0], reduction="sum")
    for name, loss in forms.items():

        def step(loss: "Callable[[], Tensor]" = loss) -> None:
            x.grad = weight.grad = None
            loss().backward()  # type: ignore[no-untyped-call]

        step()
        x.grad = weight.grad = None
        before = torch.cuda.memory_allocated(device) if context.gpu else 0
        forget_peak(device)
        taken = median_seconds(step, device)
        peak, gradients = peak_gigabytes(device), (x.nbytes + weight.nbytes) / 1e9
        chunks = CHUNKS if name == "chunked" else 1
        planned = peak_bytes(tokens, width, rows, x.element_size(), chunks, compiled="compiled" in name)
        yield {
            "loss": name,
            "tokens": tokens,
            "ms": taken * 1000,
            "peak GB": None if peak is None else max(0.0, peak - before / 1e9 - gradients),
            "planned GB": None if "PyTorch" in name else planned / 1e9,
            "value": float(loss().detach()) / tokens,
        }
