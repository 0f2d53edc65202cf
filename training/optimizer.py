"""AdamW and its learning-rate schedule, as in GPT-2 recipes."""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from common.settings import TrainSettings
from training.kernels import library
from training.kernels.adamw import Hyper, adamw_
from training.parallel.dtensor import local_shard

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
            states = [self.state[parameter] for parameter in parameters]
            steps, gradients = [state["step"] for state in states], [local_shard(each.grad) for each in parameters]
            moments = [[local_shard(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq")]
            tensors = ([local_shard(parameter) for parameter in parameters], gradients, moments[0], moments[1])
            (beta1, beta2), weight_decay, eps = group["betas"], group["weight_decay"], group["eps"]
            rate, factor = group["lr"], group.get("factor", torch.ones(()))
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


def make_optimizer(named: Mapping[str, nn.Parameter], train: TrainSettings) -> AdamW:
    """AdamW with weight decay on the parameters, by their names in the whole model, that `no_decay` does not name.

    Its state is allocated at once, all zeros, so that a checkpoint can be loaded into it in place.
    """
    parameters = list(named.values())
    spared = {name for name in named if any(fnmatchcase(name, pattern) for pattern in train.no_decay)}
    groups: list[dict[str, Any]] = [
        {"params": [named[name] for name in named if name not in spared]},
        {"params": [named[name] for name in named if name in spared], "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        [group for group in groups if group["params"]],
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        fused=all(parameter.device.type in _FUSED for parameter in parameters),
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def take_step(optimizer: torch.optim.Optimizer, rate: float, factor: Tensor) -> None:
    """One step at a learning rate with the gradients times `factor`, float32 of shape ()."""
    for group in optimizer.param_groups:
        group["lr"], group["factor"] = rate, factor
    optimizer.step()
