"""Parts of the GPU benchmark that train: the step in its variants, its profile, the planner, checkpoints, generating.

bfloat16, sequences of 1,024 tokens, the same random words for all. Ours is the trainer's own step, reading its data
included; MFU is that of training.planning.speed, 6 (N - wpe) + 12 L h s per token over the device's dense peak (989
TFLOP/s for an H100 or H200); the other share is that of the fastest bfloat16 product measured in the same run. The
first step compiles; two follow to warm up, then 10 are timed together. The initial weights are drawn on the GPU, which
takes less of the time that is short.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks import checkpoint, training
from benchmarks.gpu.items import Context, Item, peak_gigabytes, seconds
from benchmarks.harness import Row
from benchmarks.step import SIZES, Job, Steps, nanogpt, ours, transformers, write_dataset

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_STEPS: Mapping[str, Callable[[Job], Steps]] = {"ours": ours, "nanoGPT-style": nanogpt, "transformers": transformers}
_COMPILING = {"none": 10, "blocks": 30, "model": 90}  # seconds, a guess for 24 layers


@dataclass(frozen=True)
class Variant:
    """A row of the step or of the planner."""

    size: str
    micro: int
    step: str = "ours"
    dropout: float = 0.0
    train: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the defaults of the `train` section."""

    @property
    def text(self) -> str:
        """`compile model`."""
        return ", ".join(f"{key} {value}" for key, value in self.train.items())

    @property
    def name(self) -> str:
        """`345m, micro-batch 16, ours, dropout 0.1, compile model`."""
        parts = [self.size, f"micro-batch {self.micro}", self.step, f"dropout {self.dropout:g}", self.text]
        return ", ".join(part for part in parts if part)

    @property
    def seconds(self) -> float:
        """A guess of how long the row takes."""
        mode = {"nanoGPT-style": "model", "transformers": "none"}.get(self.step) or self.train.get("compile", "blocks")
        return 12 + _COMPILING[mode] * (2 if self.size == "1.5b" else 1)


# the most informative first
VARIANTS = [
    *(Variant("345m", micro) for micro in (16, 32)),
    Variant("345m", 16, "nanoGPT-style"),
    Variant("345m", 16, dropout=0.1),
    Variant("345m", 16, "transformers"),
    *(Variant(*chosen) for chosen in (("345m", 64), ("345m", 8), ("124m", 32), ("1.5b", 8))),
    *(Variant("345m", 16, train={"kernels": kernels}) for kernels in ("off", "on")),
    Variant("345m", 16, train={"compile": "model"}),
    *(Variant("345m", 16, train={"attention": attention}) for attention in ("cudnn", "flash")),
    Variant("345m", 16, train={"loss": "chunked"}),
    Variant("345m", 16, train={"compile": "none"}),
    *(Variant("345m", 16, train={"compile": "none", "kernels": kernels}) for kernels in ("on", "off")),
    Variant("345m", 16, train={"deterministic": True}),
    Variant("345m", 32, dropout=0.1),
    Variant("345m", 16, dropout=0.1, train={"attention": "cudnn"}),
    Variant("345m", 16, dropout=0.1, train={"kernels": "on"}),
    Variant("345m", 16, "nanoGPT-style", dropout=0.1),
    Variant("124m", 64),
    Variant("124m", 32, "nanoGPT-style"),
    Variant("1.5b", 16),
    Variant("1.5b", 8, train={"recompute": "selective"}),
    Variant("345m", 32, train={"compile": "model"}),
    Variant("345m", 64, train={"loss": "chunked"}),
]
_MODES = ("none", "selective", "full")
PLANNED = [
    Variant(size, micro, dropout=dropout, train={"recompute": mode})
    for sizes, dropouts in ((("345m", "124m"), (0.1, 0.0)), (("1.5b",), (0.0,)))
    for dropout in dropouts
    for size in sizes
    for micro in (16, 8)
    for mode in _MODES
]
"""What the planner predicts."""


def _distinct(variants: list[Variant], toy: bool) -> list[Variant]:
    """In a rehearsal all sizes are the same: a row for each way to train is enough."""
    return list({(one.step, one.dropout, one.text) if toy else one.name: one for one in variants}.values())


def step_items(toy: bool) -> list[Item]:
    """An item per row."""
    return [Item("step", one.name, partial(step, one), one.seconds) for one in _distinct(VARIANTS, toy)]


def planning_items(toy: bool) -> list[Item]:
    """An item per row."""
    return [Item("planning", one.name, partial(planning, one), one.seconds) for one in _distinct(PLANNED, toy)]


@contextmanager
def job_of(variant: Variant, context: Context) -> Iterator[Job]:
    """The work of a row, on random words that all rows share."""
    from training.parallel import layout

    size = SIZES["tiny" if context.toy else variant.size]
    model = size.model.model_copy(update={"dropout": variant.dropout})
    micro = max(1, variant.micro // 8) if context.toy else variant.micro
    job = Job(context.folder / "data", size._replace(model=model, micro_batch_size=micro), train=variant.train)
    if not job.settings.dataset_prefix.parent.exists():
        write_dataset(job)
    with patch.object(layout, "initial_value", partial(_drawn, context.device)):
        yield job


def _drawn(device: "torch.device", name: str, shape: "torch.Size", *_: object) -> "Tensor":
    """What replaces `initial_value` in the trainer: initial weights that are drawn on the device."""
    import torch

    if len(shape) == 1:
        return torch.full(shape, float(name.endswith("weight")), device=device)
    return torch.empty(shape, device=device).normal_(0.0, 0.02)


def step(variant: Variant, context: Context) -> Iterator[Row]:
    """The row of a variant."""
    from training.metrics.device import peak_tflops
    from training.planning.speed import flops_per_token

    device, product = context.device, context.ceiling("bfloat16", "TFLOP/s")
    with job_of(variant, context) as job:
        steps = _STEPS[variant.step](job)
        first = seconds(lambda: next(steps), device)
        next(steps)
        next(steps)
        count, losses = 2 if context.toy else 10, list[Any]()
        taken = seconds(lambda: losses.extend(islice(steps, count)), device) / count
        tokens = job.size.micro_batch_size * job.size.model.seq_len / taken
        work, peak = flops_per_token(job.size.model) * tokens, peak_tflops(device, "bfloat16")
        yield {
            "size": variant.size,
            "micro": variant.micro,
            "step": variant.step,
            "dropout": variant.dropout,
            "variant": variant.text,
            "tokens/s": tokens,
            "ms": taken * 1000,
            "MFU %": 100 * work / 1e12 / peak if peak else None,
            "of a product %": 100 * work / product if product else None,
            "peak GB": peak_gigabytes(device),
            "build and first step, s": first,
            "loss": float(losses[-1]),
        }


def profile(context: Context) -> Iterator[Row]:
    """The 15 kernels that take most of our fastest step at 345M and dropout 0, and the time in which none runs.

    Shares are of the time that all kernels take; `idle` is of the same steps, timed without the profiler.
    """
    import torch
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    rows = {(row["size"], row["micro"], row["step"], row["dropout"], row["variant"]): row["tokens/s"]
            for row in context.rows.get("step", ())}  # fmt: skip
    ours = [one for one in VARIANTS if (one.step, one.size, one.dropout) == ("ours", "345m", 0)]
    best = max(ours, key=lambda one: rows.get((one.size, one.micro, one.step, one.dropout, one.text), 0))
    kind = DeviceType.CUDA if context.gpu else DeviceType.CPU
    with job_of(best, context) as job:
        steps = _STEPS["ours"](job)
        list(islice(steps, 3))
        wall = seconds(lambda: list(islice(steps, 3)), context.device) / 3 * 1000
        with profiling(activities=[ProfilerActivity.CUDA if context.gpu else ProfilerActivity.CPU]) as profiler:
            list(islice(steps, 3))
            if context.gpu:
                torch.cuda.synchronize()
    times = []
    for event in profiler.key_averages():
        if event.device_type == kind and not getattr(event, "is_user_annotation", False):
            taken = event.self_device_time_total if context.gpu else event.self_cpu_time_total
            times.append((taken / 3000, event.count / 3, event.key.replace("|", "/")[:90]))
    times.sort(reverse=True)
    total, rest = sum(time for time, *_ in times), times[15:]
    for time, calls, name in [
        (total, sum(count for _, count, _ in times), f"all kernels of a step ({best.name})"),
        *times[:15],
        (sum(time for time, *_ in rest), sum(count for _, count, _ in rest), f"{len(rest)} others"),
        (max(0.0, wall - total), None, "idle"),
    ]:
        share = 100 * time / total if total and calls is not None else None
        yield {"kernel": name, "calls per step": calls, "ms per step": time, "share %": share}


def planning(variant: Variant, context: Context) -> Iterator[Row]:
    """A probe (training.probe) of 5 steps beside the planner; errors are predicted minus measured, of measured.

    Memory is all that the process takes from the GPU.
    """
    from training.launch.process_group import started
    from training.launch.rank import read_launch
    from training.operations import choose_operations
    from training.planning.fit import predict
    from training.planning.run import machine_of_device
    from training.probe import Figures, error_percent, measure

    launch = read_launch()
    with job_of(variant, context) as job, started(launch, job.folder) as world:
        experiment = job.settings.models["step"]
        choose_operations(experiment, world, job.folder)
        prediction = predict(experiment, machine_of_device(context.device, launch, job.settings.cluster))
        measured = Figures.measured(*measure(experiment, world, 5), prediction)
    predicted = Figures.predicted(prediction)
    yield {
        "size": variant.size,
        "micro": variant.micro,
        "dropout": variant.dropout,
        "variant": variant.text,
        "device": context.device.type,
        "predicted GB": predicted.memory / 1e9,
        "measured GB": measured.memory / 1e9,
        "memory error %": error_percent(predicted.memory, measured.memory),
        "predicted ms": 1000 * predicted.step_seconds,
        "measured ms": 1000 * measured.step_seconds,
        "time error %": error_percent(predicted.step_seconds, measured.step_seconds),
        "MFU %": 100 * measured.mfu,
    }


def checkpoints(context: Context) -> Iterator[Row]:
    """Parameters and moments of 345M, 4.3 GB, from and to the GPU; what a save in the background costs the steps."""
    with job_of(Variant("345m", 16, train={"compile": "none"}), context) as job:
        yield from checkpoint.tables(job, context.folder, 1)


def generating(context: Context) -> Iterator[Row]:
    """124M with random weights, float32, greedy; texts may part where a logit nearly equals another one."""
    size, count = ("tiny", 8) if context.toy else ("124m", 128)
    yield from training.generate(Namespace(size=size, count=count, rounds=1))
