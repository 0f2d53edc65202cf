"""Finds the first module whose output has a NaN or Inf."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from training.parallel.collectives import all_gather
from training.parallel.dtensor import local_shard


def first_non_finite(
    models: Sequence[nn.Module], parameters: Mapping[str, nn.Parameter], forward: Callable[[], object]
) -> str:
    """What became non-finite first in a step whose gradients still exist (a collective call, equal on all ranks).

    A parameter, if there is one. Otherwise the output of a module of `models`, this process's parts of the model, in
    another forward pass without dropout: `forward` runs the step's micro-batches. If that pass is finite, the gradient
    nearest to the loss.
    """
    non_finite_parameters = [name for name, parameter in parameters.items() if not _is_finite(parameter)]
    outputs: list[str] = []
    hooks = [
        module.register_forward_hook(partial(_note_non_finite, name, outputs))
        for model in models
        for name, module in model.named_modules()
        if name and not list(module.children())
    ]
    for model in models:
        model.eval()
    with torch.compiler.set_stance("force_eager"):  # compiled layers ignore hooks
        forward()
    for model in models:
        model.train()
    for hook in hooks:
        hook.remove()
    gradients = [name for name, value in parameters.items() if value.grad is not None and not _is_finite(value.grad)]
    everywhere = all_gather((non_finite_parameters, outputs, gradients))
    for index, kind in enumerate(("parameter", "the output of", "the gradient of")):
        names = sorted((name for rank in everywhere for name in rank[index]), key=_layer)
        if names:
            return f"{kind} {names[0 if kind != 'the gradient of' else -1]}"
    return "the sum of the gradients, each of which is finite"


def _layer(name: str) -> int:
    """The layer of a parameter or module: -1 for the embeddings, a large number for the head."""
    layer = re.match(r"h\.(\d+)\.", name)
    return int(layer[1]) if layer else 10**9 if name.startswith(("ln_f", "head")) else -1


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(local_shard(tensor)).all())


def _note_non_finite(name: str, outputs: list[str], _module: nn.Module, _inputs: object, output: object) -> None:
    every = [output] if isinstance(output, Tensor) else output if isinstance(output, tuple) else []
    if not all(_is_finite(values) for values in every):
        outputs.append(name)
