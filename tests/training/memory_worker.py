"""What one process of a job measures: the whole weights alive in a step, and a short course, for every ZeRO stage."""

import gc
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.helpers import Session, open_session, settings_of, step_batches
from training.launch.process_group import World
from training.parallel.data_parallel import before_backward
from training.parallel.dtensor import local_shard
from training.planning.run import Plan, make_plan
from training.step import train_step

STAGES, PRECISIONS, RECOMPUTE = (0, 1, 2, 3), ("float32", "bfloat16", "float16"), ("none", "selective", "full")
LOSS_SCALE = 2.0**10  # float16: no gradient of this model over- or underflows with it


def in_precision(plan: Plan, precision: str, recompute: str = "none", zero_stage: int = 0) -> Plan:
    experiment = plan.experiment
    parts = {
        "train": experiment.train.model_copy(update={"precision": precision, "recompute": recompute}),
        "parallel": experiment.parallel.model_copy(update={"zero_stage": zero_stage}),
    }
    return replace(plan, experiment=experiment.model_copy(update=parts))


def course(session: Session, steps: int = 3) -> list[tuple[float, float]]:
    """Losses and gradient norms."""
    batches = step_batches(session, 0)
    scale = LOSS_SCALE if session.experiment.train.precision == "float16" else 1.0
    found = [train_step(session, number, next(batches), 0.01, scale)[:2] for number in range(1, steps + 1)]
    batches.close()
    return found


def whole_weights(session: Session) -> int:
    """The bytes of all tensors as large as a whole matrix of the model that were made since gc.freeze."""
    shapes = {tuple(value.shape) for value in session.parameters.values() if value.dim() == 2}
    shapes |= {shape[::-1] for shape in shapes}
    gc.collect()
    # issubclass: isinstance would ask lazy objects of other libraries for their class
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor) and type(found) is not DTensor]
    storages = [tensor.untyped_storage() for tensor in tensors if tuple(tensor.shape) in shapes]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def weights_of_a_step(session: Session) -> dict[str, int]:
    """The bytes of whole weights within layers (the most), between forward and backward pass, and after a step."""
    (stage,) = session.stages
    (batch, *_) = next(step_batches(session, 0))
    within: list[int] = []
    hooks = [
        block.attn.core.register_forward_hook(lambda *_: within.append(whole_weights(session)))  # type: ignore[union-attr, operator]
        for block in stage.model.h.values()
    ]
    gc.collect()
    gc.freeze()  # what exists now is no longer listed: parameters and moments
    before_backward(stage, True, session.experiment.parallel.zero_stage)
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):  # makes Python objects of saved tensors
        loss = stage(batch.tokens, batch.positions, batch.targets).sum()
    forward = whole_weights(session)
    loss.backward()
    for hook in hooks:
        hook.remove()
    del loss
    course(session, steps=1)
    after = whole_weights(session)
    gc.unfreeze()
    return {"within": max(within), "forward": forward, "after": after}


class Traffic(TorchDispatchMode):
    """Counts gathers of parameters, sums of gradients over the ranks, and copies or casts of parameters."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.gathers = self.sums = self.casts = 0
        self._parameters = {local_shard(value).untyped_storage().data_ptr() for value in session.parameters.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        c10d, copies = torch.ops.c10d, (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        self.gathers += func is c10d._allgather_base_.default
        self.sums += func is c10d._reduce_scatter_base_.default
        self.sums += func is c10d.allreduce_.default and args[0][0].numel() > 3  # the others: loss, targets, norm
        if func in copies:
            self.casts += args[copies.index(func)].untyped_storage().data_ptr() in self._parameters
        return func(*args, **(kwargs or {}))


def traffic_of_steps(session: Session) -> list[list[int]]:
    """Gathers, sums and casts in a step of one micro-batch, and in a step of two."""
    counts = []
    for micro_batches in (1, 2):
        with Traffic(session) as traffic:
            train_step(session, 1, next(step_batches(session, 0))[:micro_batches], 0.0)
        counts.append([traffic.gathers, traffic.sums, traffic.casts])
    return counts


def measured(world: World, config: Path, precision: str) -> dict[str, Any]:
    """What a kind of recompute and a ZeRO stage keep and learn, by their names."""
    plan = make_plan(settings_of(config), "tiny")
    seen: dict[str, Any] = {}
    for recompute, zero_stage in product(RECOMPUTE, STAGES):
        session = open_session(in_precision(plan, precision, recompute, zero_stage), world)
        seen[f"{recompute} {zero_stage}"] = weights_of_a_step(session)
        if recompute == "none":
            session = open_session(session.plan, world)
            seen[f"{zero_stage}"] = course(session)
            seen[f"{zero_stage} traffic"] = traffic_of_steps(session)
    return seen
