"""Dropout's streams: equal outside split regions, different inside, the same after a restart."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from common.settings import ModelSettings
from tests.numerics import assert_close
from tests.training.helpers import Patch
from training.model import GPT2, AttentionCore
from training.operations import ATTENTION, use_attention
from training.parallel.layout import compile_method, recompute
from training.parallel.randomness import RandomStreams, rank_uniform

SETTINGS = ModelSettings(n_layer=2, n_head=2, n_embd=16, seq_len=8, vocab_size=32, dropout=0.5)


@pytest.fixture
def chosen() -> Iterator[None]:
    """Attention may run in any kernel again after the test."""
    yield
    use_attention(*ATTENTION)


ON_EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def draws(
    data_rank: int, tensor_rank: int, iteration: int, seed: int = 1, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers drawn inside split regions and outside of them by one rank."""
    RandomStreams(seed, (0, data_rank)).start_iteration(iteration)
    like = torch.zeros(4, device=device)
    inside = [rank_uniform(like, tensor_rank)]
    torch.rand(3, device=device)
    inside.append(rank_uniform(like, tensor_rank))
    return torch.cat(inside), torch.rand(4, device=device)


@ON_EVERY_DEVICE
def test_tensor_ranks_share_the_outside_and_differ_inside(device: str) -> None:
    (inside_0, outside_0), (inside_1, outside_1) = draws(0, 0, 5, device=device), draws(0, 1, 5, device=device)
    assert torch.equal(outside_0, outside_1)
    assert len(torch.cat([inside_0, inside_1, outside_0]).unique()) == 20  # nothing is drawn twice


def test_numbers_depend_on_data_rank_iteration_and_seed_and_not_on_earlier_draws() -> None:
    first = draws(0, 0, 5)
    for other in (draws(1, 0, 5), draws(0, 0, 6), draws(0, 0, 5, seed=2)):
        assert not torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])
    torch.rand(1000)
    assert all(map(torch.equal, first, draws(0, 0, 5)))


@ON_EVERY_DEVICE
def test_attention_drops_the_configured_share_and_keeps_the_mean(device: str) -> None:
    model, streams = GPT2(SETTINGS).to(device), RandomStreams(1, (0, 0))
    streams.attach(model, 1)
    streams.start_iteration(3)
    core = model.h["0"].attn.core
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(64, 2, 8, 8, generator=generator).to(device) for _ in range(3))
    expected = AttentionCore(0.0)(q, k, v)
    found = torch.stack([core(q, k, v) for _ in range(64)])
    assert (found[:, :, :, 0] == 0).all(dim=-1).float().mean() == pytest.approx(0.5, abs=0.03)  # attends to itself only
    assert torch.allclose(found.mean(dim=0).mean(), expected.mean(), atol=0.01)
    assert_close(core.eval()(q, k, v), expected, terms=8 + 8)  # scores of 8 terms, means of 8 values


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
def test_on_a_gpu_attention_runs_in_the_chosen_kernel(kernel: str, chosen: None) -> None:
    use_attention(kernel)
    model = GPT2(SETTINGS)
    RandomStreams(1, (0, 0)).attach(model, 1)
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(1, 2, 8, 8, device="cuda", dtype=torch.bfloat16)
        graph = make_fx(model.h["0"].attn.core)(q, q, q)
    assert f", 0.5, 1, '{kernel}')" in graph.code


def attention_of(rank: int, kind: str, compiled: bool, device: str) -> Callable[[int, int], torch.Tensor]:
    """From the first and last iteration: the weights that attention keeps in the last, (2, T, T).

    They are those of training, forward and backward, where v is the identity. All calls share what
    is compiled.
    """
    torch._dynamo.reset()
    model, streams = GPT2(SETTINGS).to(device), RandomStreams(1, (0, 0))
    streams.attach(model, rank)
    core = model.h["0"].attn.core
    if kind != "none":
        recompute(core, kind)
    if compiled:
        compile_method(core, "forward", [core])
    T = 64
    q = torch.zeros(1, 1, T, T, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)

    def masks(first: int, last: int) -> torch.Tensor:
        v = torch.eye(T, device=device, dtype=q.dtype).expand_as(q).clone().requires_grad_()
        for number in range(first, last + 1):
            streams.start_iteration(number)
            torch.rand(3, device=device)
            weights = core.forward(q, q, v)
        (gradient,) = torch.autograd.grad(weights, v, torch.eye(T, device=device, dtype=q.dtype).expand_as(q))
        return torch.cat([weights[0], gradient[0].mT]) != 0

    return masks


@pytest.mark.parametrize(
    ("device", "kernel"),
    [("cpu", "math"), *(pytest.param("cuda", kernel, marks=pytest.mark.gpu) for kernel in ATTENTION)],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_have_masks_of_their_own_which_recompute_and_a_later_start_repeat(
    device: str, kernel: str, compiled: bool, monkeypatch: Patch, chosen: None
) -> None:
    real = torch.compile
    if device == "cpu":  # takes no C++ compiler
        monkeypatch.setattr(torch, "compile", lambda function: real(function, backend=aot_eager))
    use_attention(kernel)
    for kind in ("none", "selective", "full"):
        masks = attention_of(0, kind, compiled, device)
        forward, backward = masks(1, 2)
        assert torch.equal(forward, backward)
        assert 0.4 < forward.sum() / (64 * 65 / 2) < 0.6
        assert torch.equal(masks(2, 2)[0], forward)
        assert not torch.equal(masks(1, 1)[0], forward)
        assert not torch.equal(attention_of(1, kind, compiled, device)(1, 2)[0], forward)
