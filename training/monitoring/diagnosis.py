"""Where numbers stop being finite: the first layer of the forward pass, or of the backward pass, that says so."""

import re
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from training.dataset.batches import Batch
from training.parallel.collectives import all_gather
from training.parallel.dtensor import local_shard
from training.session import Session
from training.step import run_micro_batches


def first_non_finite(session: Session, batches: Sequence[Batch]) -> str:
    """What is not finite first, of a step whose gradients are still there (a collective call, equal on all ranks).

    That is a parameter; else the output of a layer, for which the micro-batches pass forward once more, without
    dropout; else, after a forward pass that is finite, the gradient of the layer nearest to the loss.
    """
    parameters = [name for name, value in session.parameters.items() if not _finite(value)]
    outputs: list[str] = []
    hooks = [
        module.register_forward_hook(partial(_look, name, outputs))
        for stage in session.stages
        for name, module in stage.model.named_modules()
        if name and not list(module.children())
    ]
    for stage in session.stages:
        stage.eval()
    with torch.compiler.set_stance("force_eager"):  # compiled layers know nothing of hooks
        run_micro_batches(session, batches, 1.0, train=False)
    for stage in session.stages:
        stage.train()
    for hook in hooks:
        hook.remove()
    gradients = [
        name for name, value in session.parameters.items() if value.grad is not None and not _finite(value.grad)
    ]
    everywhere = all_gather((parameters, outputs, gradients))
    for place, what in enumerate(("parameter", "the output of", "the gradient of")):
        names = sorted((name for rank in everywhere for name in rank[place]), key=_depth)
        if names:
            return f"{what} {names[0 if what != 'the gradient of' else -1]}"
    return "the sum of the gradients, each of which is finite"


def _depth(name: str) -> int:
    """The layer that a name belongs to: -1 before the first, a large number behind the last."""
    layer = re.match(r"h\.(\d+)\.", name)
    return int(layer[1]) if layer else 10**9 if name.startswith(("ln_f", "head")) else -1


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(local_shard(tensor)).all())


def _look(name: str, outputs: list[str], _module: nn.Module, _inputs: object, output: object) -> None:
    if isinstance(output, Tensor):
        values = local_shard(output)
        if bool((values.isnan() | values.isposinf()).any()):  # the head's padding rows are -inf, and meant to be
            outputs.append(name)
