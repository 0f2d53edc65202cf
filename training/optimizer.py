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

    Skipped steps do not count (Megatron-LM's rule): the next step has the same rate. After the
    warm-up the rate rises only where a cosine begins again (Loshchilov and Hutter 2017).

    Cosine, linear and WSD (Hu et al. 2024; sqrt: Hägele et al. 2024) have `min_lr` from iteration
    `train.decay_end` on, counted from 1, whatever the lengths of cooldown, cycle and warm-up. A
    warm-up over all iterations ends at `lr`. Megatron-LM's inverse square root passes through `lr`
    at the end of the warm-up, and has `min_lr` after `train.decay_end`.
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
    """A message if the settings `now` change the learning rate after `taken` steps, or "".

    Raising `iterations` stretches a schedule that ends at the last iteration.
    """
    old, new = (learning_rate(taken, train) for train in (before, now))
    if math.isclose(old, new, rel_tol=1e-9):
        return ""
    return (
        f"learning rate: {learning_rate(max(0, taken - 1), before):.3g} in the last step, {new:.3g} in the next one; "
        f"the schedule of the checkpoint ({before.iterations} iterations) has {old:.3g} there"
    )


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """Steps taken by an optimiser, including those before a resume, without skipped ones."""
    return round(float(next(iter(optimizer.state.values()))["step"]))


class Optimizer(torch.optim.AdamW):
    """AdamW, and Muon for a group that has it, on shards: a DTensor would cost the host 0.1 ms."""

    @torch.no_grad()
    def step(self, rate: float, factor: Tensor) -> None:  # type: ignore[override]
        """One step at `rate` times each group's `scale`; multiplies the gradients by `factor`."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [local_shard(parameter.grad) for parameter in parameters]
            steps, exp_avgs, exp_avg_sqs = (self._state(parameters, key) for key in ("step", *ADAMW))
            lr = rate * group["scale"]
            if "muon" in group:
                torch._foreach_add_(steps, 1.0)
                torch._foreach_mul_(gradients, factor.to(gradients[0].device))
                group["muon"].step(exp_avgs, gradients, lr)
                continue
            tensors = ([local_shard(parameter) for parameter in parameters], gradients, exp_avgs, exp_avg_sqs)
            (beta1, beta2), eps, weight_decay = group["betas"], group["eps"], group["weight_decay"]
            if library.selected("adamw", gradients[0]):  # our kernel reads and writes each tensor once
                if "taken" not in group:  # counted here from now on: reading the device's count would wait for it
                    group["taken"] = round(float(steps[0]))
                group["taken"] += 1
                torch._foreach_add_(steps, 1.0)
                adamw_(*tensors, [weight_decay] * len(steps), factor, Hyper(lr, beta1, beta2, eps, group["taken"]))
            else:
                torch._foreach_mul_(gradients, factor.to(gradients[0].device))
                rates = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
                adamw(*tensors, [], steps, fused=group["fused"], amsgrad=False, maximize=False, **rates)

    def _state(self, parameters: list[Tensor], key: str) -> list[Tensor]:
        """This process's shards of a part of the state, for the parameters that have it."""
        states = (self.state[parameter] for parameter in parameters)
        return [local_shard(state[key]) for state in states if key in state]


def adamw_scale(train: TrainSettings) -> float:
    """The factor of the learning rate for parameters of AdamW beside Muon's; 1 without Muon."""
    return (train.adamw_lr or train.lr) / train.lr if train.optimizer == "muon" else 1.0


def make_optimizer(
    named: Mapping[str, nn.Parameter], experiment: Experiment, mesh: DeviceMesh | None = None
) -> Optimizer:
    """The optimiser of this process's parameters, by their names (a collective call over `mesh`).

    Weight decay is for those that `train.no_decay` does not name. The state is allocated here, all
    zeros: a checkpoint is loaded into it in place.
    """
    train = experiment.train
    moments = {name: moments_of(leaf_of(name), train.optimizer) for name in named}
    decay = {
        name: 0.0 if any(fnmatchcase(name, pattern) for pattern in train.no_decay) else train.weight_decay
        for name in named
    }
    groups: list[dict[str, Any]] = []
    if train.optimizer == "muon":
        matrices = {name: parameter for name, parameter in named.items() if moments[name] == MUON}
        muon = Muon(matrices, decay, train.muon_momentum, experiment.model.n_head, mesh)
        groups.append({"params": muon.matrices, "muon": muon, "scale": 1.0})
    for each in dict.fromkeys((train.weight_decay, 0.0)):
        rest = [named[name] for name in named if moments[name] == ADAMW and decay[name] == each]
        groups.append({"params": rest, "scale": adamw_scale(train), "weight_decay": each})
    optimizer = Optimizer(
        [group for group in groups if group["params"]],
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
