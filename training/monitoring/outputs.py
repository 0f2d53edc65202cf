"""Looks at a batch again: target losses, logits of the next token, the first non-finite module.

All run the training's own layout forward, without dropout, and leave weights and gradients as they
are: a step may be between its backward pass and the optimiser.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from training.dataset.batches import Batch
from training.loss import IGNORED, LossHead
from training.parallel.collectives import all_gather
from training.parallel.data_parallel import reshard
from training.parallel.dtensor import local_shard
from training.parallel.layout import coordinates
from training.session import Session
from training.step import run_micro_batches, sample_ranges


def target_losses(
    session: Session, batches: Sequence[Batch], consumed: int
) -> list[tuple[int, npt.NDArray[Any], npt.NDArray[Any]]]:
    """(number, nats per target, which targets count) of each sample, (T,) both (a collective call).

    `batches` are this process's of the global batch from sample `consumed` on.
    """
    losses = _compute(session, batches, lambda head, x, weight, targets: head.target_losses(x, weight, targets))
    if not losses or coordinates(session.mesh)[2]:  # all ranks of a tensor-parallel group have the same
        return []
    numbers = chain.from_iterable(islice(sample_ranges(session, consumed), len(batches)))
    counted = (torch.cat([batch.targets for batch in batches]) != IGNORED).cpu()
    nats = torch.cat(losses).view(counted.shape).cpu()
    return list(zip(numbers, nats.numpy(), counted.numpy(), strict=True))


def next_logits(session: Session, text: Sequence[int]) -> Tensor:
    """Logits (V,), on the CPU, of the token after `text` (a collective call, equal on all ranks).

    The text is a sample of a micro-batch: all others are padding, and nothing counts as a target.
    """
    experiment = session.experiment
    window = [*text][-experiment.model.seq_len :]
    row = torch.tensor(window + [0] * (experiment.model.seq_len - len(window)))
    tokens = row.expand(experiment.train.micro_batch_size, -1)
    batch = Batch(tokens, torch.full_like(tokens, IGNORED), None, None, 0)
    micro_batches = [batch] * (experiment.accumulation if session.pipeline else 1)
    logits = _compute(session, micro_batches, lambda head, x, weight, _: head.logits_at(len(window) - 1, x, weight))
    data_rank = coordinates(session.mesh)[1]
    of_ranks = all_gather([row.float().cpu() for row in logits[-1:] if data_rank == 0])
    return torch.cat([part for parts in of_ranks for part in parts])  # tensor-parallel ranks are adjacent


def _compute(
    session: Session, batches: Sequence[Batch], output: Callable[[LossHead, Tensor, Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """`output` of each micro-batch's (head, x, weight, targets); [] if this process has no head."""
    outputs: list[Tensor] = []

    def hook(head: LossHead, inputs: tuple[Tensor, ...], _loss: Tensor) -> None:
        outputs.append(output(head, *inputs[:3]))

    heads = [stage.model.head for stage in session.stages if stage.last]
    _run_forward(session, batches, [(head, hook) for head in heads])
    return outputs


def _run_forward(
    session: Session, batches: Sequence[Batch], hooks: Iterable[tuple[nn.Module, Callable[..., None]]]
) -> None:
    """Run micro-batches forward, without dropout, with hooks on modules (a collective call)."""
    with ExitStack() as stack:
        for module, hook in hooks:
            stack.callback(module.register_forward_hook(hook).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled graph calls no hook
        run_micro_batches(session, batches, 1.0, train=False)
    for stage in session.stages:
        reshard(stage)


def first_non_finite(session: Session, batches: Sequence[Batch]) -> str:
    """The first non-finite part of a step that still has its gradients (a collective call).

    A parameter, if there is one; else the output of a module, when the micro-batches run forward
    again; else the gradient nearest to the loss. Equal on all ranks.
    """
    parameters = session.parameters
    non_finite_parameters = [name for name, parameter in parameters.items() if not _is_finite(parameter)]
    outputs: list[str] = []

    def note(name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        every = [output] if isinstance(output, Tensor) else output if isinstance(output, tuple) else []
        if not all(map(_is_finite, every)):
            outputs.append(name)

    modules = chain.from_iterable(stage.model.named_modules() for stage in session.stages)
    leaves = [(name, module) for name, module in modules if name and not list(module.children())]
    _run_forward(session, batches, [(module, partial(note, name)) for name, module in leaves])
    gradients = [name for name, value in parameters.items() if value.grad is not None and not _is_finite(value.grad)]
    everywhere = all_gather((non_finite_parameters, outputs, gradients))
    for index, kind in enumerate(("parameter", "the output of", "the gradient of")):
        names = sorted((name for rank in everywhere for name in rank[index]), key=_layer)
        if names:
            return f"{kind} {names[0 if kind != 'the gradient of' else -1]}"
    return "the sum of the gradients; each one is finite"


def _layer(name: str) -> int:
    """The layer of a parameter or module: -1 for the embeddings, a large number for the head."""
    layer = re.match(r"h\.(\d+)\.", name)
    return int(layer[1]) if layer else 10**9 if name.startswith(("ln_f", "head")) else -1


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(local_shard(tensor)).all())
