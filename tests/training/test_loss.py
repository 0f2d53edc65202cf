"""The loss and its gradients, whole, in parts and as the compiler sees them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from training import loss as module
from training.logits_memory import peak_bytes
from training.loss import LossHead
from training.model import IGNORED

TRUE, ROWS, WIDTH = 211, 256, 48


def problem(dtype: torch.dtype, tokens: tuple[int, int] = (3, 21)) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, an embedding with padding rows, and targets of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*tokens, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(ROWS, WIDTH, generator=generator) * 0.2
    targets = torch.randint(TRUE, tokens, generator=generator)
    targets[0, ::5] = IGNORED
    return x.requires_grad_(), weight.requires_grad_(), targets


def expected(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in float64."""
    x, weight, targets = problem(dtype)
    wide, matrix = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = F.linear(wide, matrix[:TRUE]).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    loss.backward()
    return loss.detach(), wide.grad, matrix.grad  # type: ignore[return-value]


@pytest.mark.parametrize("form", ["whole", "chunked", "compiled"])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_each_form_gives_the_loss_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch, form: str, dtype: torch.dtype, near: float
) -> None:
    if form == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x, weight, targets = problem(dtype)
    found = LossHead(TRUE, chunks=4 if form == "chunked" else 1)(x, weight, targets)
    (2 * found).backward()
    loss, of_x, of_weight = expected(dtype)
    assert found.dtype == torch.float32 and found.item() == pytest.approx(loss.item(), rel=near)
    for gradient, wanted in ((x.grad, of_x), (weight.grad, of_weight)):
        assert gradient is not None
        assert float((gradient.double() / 2 - wanted).norm() / wanted.norm()) < near
    assert not weight.grad[TRUE:].any() and x.grad.dtype == dtype  # type: ignore[index, union-attr]


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.filterwarnings("ignore")  # the compiler looks at everything, deprecated things too
def test_a_compiled_loss_has_the_same_gradients(chunks: int) -> None:
    x, weight, targets = problem(torch.float32)
    torch._dynamo.reset()
    torch.compile(LossHead(TRUE, chunks), backend="aot_eager", fullgraph=True)(x, weight, targets).backward()
    _, of_x, of_weight = expected(torch.float32)
    for gradient, wanted in ((x.grad, of_x), (weight.grad, of_weight)):
        assert gradient is not None
        assert float((gradient.double() - wanted).norm() / wanted.norm()) < 1e-6


def test_only_ignored_targets_give_no_loss_and_no_gradient() -> None:
    x, weight, targets = problem(torch.float32)
    found = LossHead(TRUE)(x, weight, torch.full_like(targets, IGNORED))
    found.backward()
    assert found.item() == 0 and not x.grad.any() and not weight.grad.any()  # type: ignore[union-attr]


def test_a_second_backward_pass_is_refused_because_the_first_has_overwritten_the_logits() -> None:
    x, weight, targets = problem(torch.float32)
    found = LossHead(TRUE)(x, weight, targets)
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        found.backward()


@pytest.mark.parametrize("chunks", [1, 8])
def test_the_logits_are_as_large_as_the_plan_says(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Larger intermediate tensors than the logits would show."""
    x, weight, targets = problem(torch.float32, (4, 64))
    largest = 0

    def linear(part: Tensor, matrix: Tensor) -> Tensor:
        nonlocal largest
        logits = torch.mm(part, matrix.t())
        largest = max(largest, logits.nbytes)
        return logits

    monkeypatch.setattr(module.F, "linear", linear)
    LossHead(TRUE, chunks)(x, weight, targets)
    rest = 0 if chunks == 1 else weight.nbytes + x.nbytes
    assert peak_bytes(4 * 64, WIDTH, ROWS, 4, chunks, compiled=False) == largest + rest


def test_validation_computes_no_gradient() -> None:
    x, weight, targets = problem(torch.float32)
    with torch.no_grad():
        found = LossHead(TRUE, chunks=4)(x, weight, targets)
    assert not found.requires_grad and found.item() == pytest.approx(expected(torch.float32)[0].item(), rel=1e-6)
