"""The loss and its gradients, whole, in parts and as the compiler sees them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.training.helpers import Patch
from training import loss
from training.loss import LossHead
from training.model import IGNORED

TRUE, ROWS, WIDTH = 211, 256, 48


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, an embedding with padding rows, and targets of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 21, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(ROWS, WIDTH, generator=generator) * 0.2
    targets = torch.randint(TRUE, (3, 21), generator=generator)
    targets[0, ::5] = IGNORED
    return x.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("form", ["whole", "chunked", "formula", "compiled", "compiled chunked"])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.filterwarnings("ignore")  # the compiler looks at everything, deprecated things too
def test_each_form_gives_the_loss_and_its_gradients(
    monkeypatch: Patch, form: str, dtype: torch.dtype, near: float
) -> None:
    head = LossHead(TRUE, chunks=4 if "chunked" in form else 1)
    if form == "formula":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    elif "compiled" in form:
        torch._dynamo.reset()
        head = torch.compile(head, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    x, weight, targets = problem(dtype)
    factor = torch.tensor([2.0, 3.0, 0.5])
    found = head(x, weight, targets, factor)
    found.backward()
    wide, matrix = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = F.linear(wide, matrix[:TRUE]).flatten(0, 1)
    losses = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="none")
    expected = (losses.unflatten(0, (3, 21)) * factor[:, None]).sum()
    expected.backward()
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=near)
    for gradient, wanted in ((x.grad, wide.grad), (weight.grad, matrix.grad)):
        assert gradient is not None and wanted is not None
        assert float((gradient.double() - wanted).norm() / wanted.norm()) < near
    assert not weight.grad[TRUE:].any() and x.grad.dtype == dtype  # type: ignore[index, union-attr]


def test_a_validation_computes_no_gradients(monkeypatch: Patch) -> None:
    x, weight, targets = problem(torch.float32)
    expected = LossHead(TRUE)(x, weight, targets)
    monkeypatch.setattr(loss, "_gradient", None)
    for chunks in (1, 4):
        with torch.no_grad():
            assert LossHead(TRUE, chunks)(x, weight, targets).item() == pytest.approx(expected.item(), rel=1e-6)
