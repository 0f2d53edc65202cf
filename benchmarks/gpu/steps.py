"""Parts of the GPU benchmark that train: the step in its variants, the planner, checkpoints, generating.

bfloat16, sequences of 1,024 tokens, the same random words for all. Ours is the trainer's own step, reading its data
included; MFU is that of training.planning.speed, 6 (N - wpe) + 12 L h s per token over the device's dense peak (989
TFLOP/s for an H100 or H200); TFLOP/s are to be compared with the products of the part `machine`. The first step
compiles; two follow to warm up, then ten at a time are timed until ten seconds have passed.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import checkpoint, training
from benchmarks.gpu.items import Context, Item, seconds
from benchmarks.harness import Row
from benchmarks.step import SIZES, Job, Steps, nanogpt, ours, transformers, write_dataset

_STEPS: Mapping[str, Callable[[Job], Steps]] = {"ours": ours, "nanoGPT-style": nanogpt, "transformers": transformers}
_GOALS = {"345m": 50.0, "124m": 40.5}  # MFU in per cent at dropout 0; the best published are 46.2 and llm.c's


def items(part: str, toy: bool) -> list[Item]:
    """The rows of a part in rows.txt. In a rehearsal all sizes are the same: a row for each way to train is enough."""
    lines = [line.split(" ", 1) for line in Path(__file__).with_name("rows.txt").read_text("utf-8").splitlines()]
    rows = [row for name, row in lines if name == part]
    chosen = {tuple(row.split(" ")[2 if toy else 0 :]): row for row in rows}
    return [Item(part, row, partial(_PARTS[part], row)) for row in chosen.values()]


def job_of(row: str, context: Context) -> tuple[Job, str]:
    """The work of a row, on random words that all rows share, and who does it."""
    name, micro, *words = row.split(" ")
    keys: dict[str, Any] = dict(word.split("=") for word in words)
    who, dropout = keys.pop("step", "ours"), float(keys.pop("dropout", 0))
    size = SIZES["tiny" if context.toy else name]
    model = size.model.model_copy(update={"dropout": dropout})
    size = size._replace(model=model, micro_batch_size=max(1, int(micro) // 8) if context.toy else int(micro))
    job = Job(context.folder / "data", size, keys)
    if not job.settings.dataset_prefix.parent.exists():
        write_dataset(job)
    return job, who


def step(row: str, context: Context) -> Iterator[Row]:
    """Speed, memory and loss of an optimiser step."""
    import torch

    from training.metrics.device import peak_tflops
    from training.planning.speed import flops_per_token

    device = context.device
    job, who = job_of(row, context)
    steps = _STEPS[who](job)
    first = seconds(lambda: next(steps), device)
    losses = [next(steps), next(steps)]
    count, taken = 0, 0.0
    while taken < context.least:
        taken += seconds(lambda: losses.extend(islice(steps, 10)), device)
        count += 10
    tokens = count * job.size.micro_batch_size * job.size.model.seq_len / taken
    work, peak = flops_per_token(job.size.model) * tokens / 1e12, peak_tflops(device, "bfloat16")
    yield {
        "step": row,
        "tokens/s": tokens,
        "ms": 1000 * taken / count,
        "MFU %": 100 * work / peak if peak else None,
        "goal": _GOALS.get(row.split(" ")[0]) if who == "ours" and not job.size.model.dropout else None,
        "TFLOP/s": work,
        "peak GB": torch.cuda.max_memory_allocated() / 1e9 if context.gpu else None,
        "build and first step, s": first,
        "loss": float(losses[-1]),
    }


def planning(row: str, context: Context) -> Iterator[Row]:
    """A probe (training.probe) of 5 steps beside the planner; errors are predicted minus measured, of measured.

    Memory is all that the process takes from the GPU.
    """
    from training.launch.process_group import started
    from training.launch.rank import read_launch
    from training.operations import choose_operations
    from training.planning.fit import predict
    from training.planning.run import machine_of
    from training.probe import Figures, error_percent, measure

    job, _ = job_of(row, context)
    with started(read_launch(), job.folder) as world:
        experiment = job.settings.models["step"]
        choose_operations(experiment, world, job.folder)
        prediction = predict(experiment, machine_of(world, job.settings.cluster))
        measured = Figures.measured(*measure(experiment, world, 5), prediction)
    predicted = Figures.predicted(prediction)
    yield {
        "step": row,
        "device": context.device.type,
        "predicted GB": predicted.memory / 1e9,
        "measured GB": measured.memory / 1e9,
        "memory error %": error_percent(predicted.memory, measured.memory),
        "predicted ms": 1000 * predicted.step_seconds,
        "measured ms": 1000 * measured.step_seconds,
        "time error %": error_percent(predicted.step_seconds, measured.step_seconds),
        "MFU %": 100 * measured.mfu,
    }


_PARTS: Mapping[str, Callable[[str, Context], Iterator[Row]]] = {"step": step, "planning": planning}


def checkpoints(context: Context) -> Iterator[Row]:
    """Parameters and moments of 345M, 4.3 GB, from and to the GPU; what a save in the background costs the steps."""
    job, _ = job_of("345m 16 compile=none", context)
    yield from checkpoint.tables(job, context.folder, 1)


def generating(context: Context) -> Iterator[Row]:
    """124M with random weights, float32, greedy; texts may part where a logit nearly equals another one."""
    size, count = ("tiny", 8) if context.toy else ("124m", 128)
    yield from training.generate(Namespace(size=size, count=count, rounds=1, work=context.folder))
