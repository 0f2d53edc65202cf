"""The optimiser of a run, AdamW or Muon, and the learning-rate schedule."""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.adamw import adamw

from common.settings import Experiment, TrainSettings
from training.kernels import library
from training.kernels.adamw import Hyper, adamw_
from training.moments import ADAMW, MUON, moments_of
from training.muon import Muon
from training.parallel.dtensor import local_shard
from training.tensors import leaf_of

_FUSED = ("cpu", "cuda")  # devices with a fused AdamW kernel


def learning_rate(iteration: int, train: TrainSettings) -> float:
    """The learning rate after `iteration` steps taken: a linear warm-up to `lr`, then `lr_decay`.

    Skipped steps do not count (Megatron-LM's rule): the next step has the same rate. After the warm-up the rate rises
    only where a cosine begins again (Loshchilov and Hutter 2017).

    Cosine, linear, and warm-up, stable, decay (Hu et al. 2024; sqrt: Hägele et al. 2024) have `min_lr` in iteration
    `train.decay_end`, counted from 1, and after it. This holds for every length: a cooldown of 0 or 1 iterations, one
    iteration after the warm-up, a run that ends within a cycle. A warm-up over all iterations ends at `lr`. The
    inverse square root, Megatron-LM's, passes through `lr` at the end of the warm-up, and has `min_lr` after
    `train.decay_end`.
    """
    warmup = train.warmup_end
    if iteration < warmup:
        return train.lr * (iteration + 1) / warmup
    if train.lr_decay == "constant":
        return train.lr
    if iteration >= train.decay_end - (train.lr_decay != "inverse_sqrt"):
        return train.min_lr
    if train.lr_decay == "inverse_sqrt":
        return max(train.min_lr, train.lr * math.sqrt(max(1, warmup) / (iteration + 1)))
    shape: str = train.lr_decay
    begin, length = warmup, train.decay_end - warmup
    if train.lr_decay == "wsd":
        begin, shape = max(warmup, train.decay_end - train.cooldown_length), train.cooldown
        length = train.decay_end - begin
    elif train.lr_decay == "cosine" and train.cycle_iterations:
        length = train.cycle_iterations
        begin += (iteration - warmup) // length * length
    progress = max(0, iteration - begin) / max(1, length - 1)
    left = {"linear": 1 - progress, "sqrt": 1 - math.sqrt(progress)}.get(
        shape, 0.5 * (1 + math.cos(math.pi * progress))
    )
    return train.min_lr + (train.lr - train.min_lr) * left


def rate_change(before: TrainSettings, now: TrainSettings, taken: int) -> str:
    """A message if the settings `now` change the learning rate of a run that resumes after `taken` steps, or "".

    A schedule that ends at the last iteration is stretched when a run is extended.
    """
    expected, found = (learning_rate(taken, train) for train in (before, now))
    if math.isclose(expected, found, rel_tol=1e-9):
        return ""
    return (
        f"learning rate: {learning_rate(max(0, taken - 1), before):.3g} in the last step, {found:.3g} in the next one; "
        f"the schedule of the checkpoint ({before.iterations} iterations) has {expected:.3g} there"
    )


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """Steps taken by an optimiser of `make_optimizer`, including those before a resume, without skipped ones."""
    return round(float(next(iter(optimizer.state.values()))["step"]))


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW on this process's shards, or our kernel's. DTensors would cost the host 0.1 ms each."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of each group at its `lr`, with the gradients times its `factor` (default 1)."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [local_shard(each.grad) for each in parameters]
            self.update(group, parameters, gradients, group.get("factor", torch.ones(())))

    def update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], factor: Tensor) -> None:
        """One step of a group's parameters with this process's shards of their gradients."""
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        moments = [[local_shard(state[key]) for state in states] for key in ADAMW]
        tensors = ([local_shard(parameter) for parameter in parameters], gradients, moments[0], moments[1])
        (beta1, beta2), weight_decay, eps, rate = group["betas"], group["weight_decay"], group["eps"], group["lr"]
        if library.selected("adamw", gradients[0]):  # our kernel reads and writes each tensor once
            if "taken" not in group:  # counted here from now on: reading the device's count would wait for it
                group["taken"] = round(float(steps[0]))
            group["taken"] += 1
            torch._foreach_add_(steps, 1.0)
            adamw_(*tensors, [weight_decay] * len(steps), factor, Hyper(rate, beta1, beta2, eps, group["taken"]))
        else:
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
            rates = {"lr": rate, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
            adamw(*tensors, [], steps, fused=group["fused"], amsgrad=False, maximize=False, **rates)


class MuonAdamW(AdamW):
    """Muon for the group that has it under `muon`, AdamW for the others."""

    def update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], factor: Tensor) -> None:
        """One step of a group's parameters with this process's shards of their gradients."""
        if "muon" not in group:
            return super().update(group, parameters, gradients, factor)
        states = [self.state[parameter] for parameter in parameters]
        torch._foreach_add_([state["step"] for state in states], 1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        group["muon"].step([local_shard(state["exp_avg"]) for state in states], gradients, group["lr"])
        return None


OPTIMIZERS: Mapping[str, type[AdamW]] = {"adamw": AdamW, "muon": MuonAdamW}
"""The values of `train.optimizer`."""


def adamw_scale(train: TrainSettings) -> float:
    """The factor of the learning rate for parameters of AdamW beside Muon's; 1 without Muon."""
    return (train.adamw_lr or train.lr) / train.lr if train.optimizer == "muon" else 1.0


def make_optimizer(named: Mapping[str, nn.Parameter], experiment: Experiment, mesh: DeviceMesh | None = None) -> AdamW:
    """The optimiser of `train.optimizer`; `named`: this process's parameters by their names in the whole model.

    Weight decay is for those that `train.no_decay` does not name. The state is allocated at once, all zeros, so that a
    checkpoint can be loaded into it in place. A collective call over `mesh`.
    """
    train = experiment.train
    moments = {name: moments_of(leaf_of(name), train.optimizer) for name in named}
    decay = {
        name: 0.0 if any(fnmatchcase(name, pattern) for pattern in train.no_decay) else train.weight_decay
        for name in named
    }
    groups: list[dict[str, Any]] = []
    rest, scale = dict(named), 1.0
    if train.optimizer == "muon":
        matrices = {name: rest.pop(name) for name in named if moments[name] == MUON}
        muon = Muon(matrices, decay, train.muon_momentum, experiment.model.n_head, mesh)
        groups.append({"params": muon.matrices, "muon": muon, "scale": 1.0})
        scale = adamw_scale(train)
    for each in dict.fromkeys((train.weight_decay, 0.0)):
        groups.append({"params": [rest[name] for name in rest if decay[name] == each], "weight_decay": each})
    optimizer = OPTIMIZERS[train.optimizer](
        [{"scale": scale, **group} for group in groups if group["params"]],
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        fused=all(parameter.device.type in _FUSED for parameter in named.values()),
    )
    for name, parameter in named.items():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in moments[name]},
        }
    return optimizer


def take_step(optimizer: torch.optim.Optimizer, rate: float, factor: Tensor) -> None:
    """One step at a learning rate, times each group's `scale`, with the gradients times `factor`, float32, ()."""
    for group in optimizer.param_groups:
        group["lr"], group["factor"] = rate * group["scale"], factor
    optimizer.step()
