"""Parts of the GPU benchmark that train: the step in its variants, the planner, checkpoints, generating.

bfloat16, sequences of 1,024 tokens, the same random words for all. Ours is the trainer's own step, reading its data
included; MFU is that of training.planning.speed, 6 (N - wpe) + 12 L h s per token over the device's dense peak (989
TFLOP/s for an H100 or H200); the other share is that of the fastest bfloat16 product measured in the same run. The
first step compiles; two follow to warm up, then 10 are timed together.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from benchmarks import checkpoint, training
from benchmarks.gpu.items import Context, Item, peak_gigabytes, seconds
from benchmarks.harness import Row
from benchmarks.step import SIZES, Job, Steps, nanogpt, ours, transformers, write_dataset

_STEPS: Mapping[str, Callable[[Job], Steps]] = {"ours": ours, "nanoGPT-style": nanogpt, "transformers": transformers}
_GOALS = {"345m": 50.0, "124m": 40.5}  # MFU in per cent at dropout 0; the best published are 46.2 and llm.c's


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
    def columns(self) -> dict[str, Any]:
        """What distinguishes the row."""
        text = ", ".join(f"{key} {value}" for key, value in self.train.items())
        return {"size": self.size, "micro": self.micro, "step": self.step, "dropout": self.dropout, "variant": text}

    @property
    def name(self) -> str:
        """`345m, micro 16, step ours, dropout 0.1, variant compile model`."""
        return ", ".join(f"{key} {value}" for key, value in self.columns.items() if value != "")


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
    return list({(one.step, one.dropout, str(one.train)) if toy else one.name: one for one in variants}.values())


def step_items(toy: bool) -> list[Item]:
    """An item per row."""
    return [Item("step", one.name, partial(step, one)) for one in _distinct(VARIANTS, toy)]


def planning_items(toy: bool) -> list[Item]:
    """An item per row."""
    return [Item("planning", one.name, partial(planning, one)) for one in _distinct(PLANNED, toy)]


def job_of(variant: Variant, context: Context) -> Job:
    """The work of a row, on random words that all rows share."""
    size = SIZES["tiny" if context.toy else variant.size]
    model = size.model.model_copy(update={"dropout": variant.dropout})
    micro = max(1, variant.micro // 8) if context.toy else variant.micro
    job = Job(context.folder / "data", size._replace(model=model, micro_batch_size=micro), train=variant.train)
    if not job.settings.dataset_prefix.parent.exists():
        write_dataset(job)
    return job


def step(variant: Variant, context: Context) -> Iterator[Row]:
    """The row of a variant."""
    from training.metrics.device import peak_tflops
    from training.planning.speed import flops_per_token

    device, product, job = context.device, context.ceiling("bfloat16", "TFLOP/s"), job_of(variant, context)
    steps = _STEPS[variant.step](job)
    first = seconds(lambda: next(steps), device)
    next(steps)
    next(steps)
    count, losses = 2 if context.toy else 10, list[Any]()
    taken = seconds(lambda: losses.extend(islice(steps, count)), device) / count
    tokens = job.size.micro_batch_size * job.size.model.seq_len / taken
    work, peak = flops_per_token(job.size.model) * tokens, peak_tflops(device, "bfloat16")
    yield {
        **variant.columns,
        "tokens/s": tokens,
        "ms": taken * 1000,
        "MFU %": 100 * work / 1e12 / peak if peak else None,
        "goal": _GOALS.get(variant.size) if variant.step == "ours" and not variant.dropout else None,
        "of a product %": 100 * work / product if product else None,
        "peak GB": peak_gigabytes(device),
        "build and first step, s": first,
        "loss": float(losses[-1]),
    }


def planning(variant: Variant, context: Context) -> Iterator[Row]:
    """A probe (training.probe) of 5 steps beside the planner; errors are predicted minus measured, of measured.

    Memory is all that the process takes from the GPU.
    """
    from training.launch.process_group import started
    from training.launch.rank import read_launch
    from training.operations import choose_operations
    from training.planning.fit import predict
    from training.planning.run import machine_of
    from training.probe import Figures, error_percent, measure

    job = job_of(variant, context)
    with started(read_launch(), job.folder) as world:
        experiment = job.settings.models["step"]
        choose_operations(experiment, world, job.folder)
        prediction = predict(experiment, machine_of(world, job.settings.cluster))
        measured = Figures.measured(*measure(experiment, world, 5), prediction)
    predicted = Figures.predicted(prediction)
    yield {
        **variant.columns,
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
    job = job_of(Variant("345m", 16, train={"compile": "none"}), context)
    yield from checkpoint.tables(job, context.folder, 1)


def generating(context: Context) -> Iterator[Row]:
    """124M with random weights, float32, greedy; texts may part where a logit nearly equals another one."""
    size, count = ("tiny", 8) if context.toy else ("124m", 128)
    yield from training.generate(Namespace(size=size, count=count, rounds=1))
