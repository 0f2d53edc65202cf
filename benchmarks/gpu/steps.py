"""Parts of the GPU benchmark that train: many kinds of steps, the planner, checkpoints, text.

All rows: bfloat16, sequences of 1,024 tokens, the same random words. Ours is the trainer's own step
with reading its data. MFU is that of training.planning.speed, over the device's dense peak (989
TFLOP/s for an H100 or H200); compare TFLOP/s with the products of the part `machine`. The first
step compiles, two warm up, then groups of five are timed for `--seconds`. Our kernels are off
unless a row names them; `kernels=auto` measures them as a long run does.
"""

import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from math import nan
from pathlib import Path
from typing import Any

from benchmarks import checkpoint, training
from benchmarks.gpu.items import Context, Item, seconds
from benchmarks.harness import Row
from benchmarks.step import CONTENDERS, SIZES, Job, write_dataset
from common.files import read_json

_GOALS = {"345m": 50.0, "124m": 42.0}  # MFU in per cent at dropout 0; the best published: 46.2 and 40.5


def items(toy: bool) -> list[Item]:
    """The rows of rows.txt; a rehearsal, at one size, has one row per way to train."""
    rows = [line.split(" ", 1) for line in Path(__file__).with_name("rows.txt").read_text("utf-8").splitlines()]
    chosen = {(part, *row.split(" ")[2 if toy else 0 :]): (part, row) for part, row in rows if part in _PARTS}
    # graphs of a whole model, and choices of kernels, which compile a layer for each kernel
    slow = re.compile("step=|compile=model|kernels=auto")
    return [
        Item(part, row, partial(_PARTS[part], row), 240 if slow.search(row) else 120) for part, row in chosen.values()
    ]


def job_of(row: str, context: Context) -> tuple[Job, str]:
    """The job of a row, and who does it."""
    name, micro, *words = row.split(" ")
    keys: dict[str, Any] = dict(word.split("=") for word in words)
    who, dropout = keys.pop("step", "ours"), float(keys.pop("dropout", 0))
    size = SIZES["tiny" if context.toy else name]
    model = size.model.model_copy(update={"dropout": dropout})
    size = size._replace(model=model, micro_batch_size=max(1, int(micro) // 8) if context.toy else int(micro))
    keys.setdefault("kernels", "off")
    job = Job(context.folder / f"data-{os.getpid()}", size, keys)  # its own folder: operations.json
    write_dataset(job)
    return job, who


def step(row: str, context: Context) -> Iterator[Row]:
    """Speed, memory and loss of a step; for ours also predictions and chosen operations."""
    import torch

    from training.launch.process_group import World
    from training.metrics.device import peak_tflops
    from training.planning.run import machine_of
    from training.planning.search import predict
    from training.planning.speed import flops_per_token
    from training.trial import Figures

    device = context.device
    job, who = job_of(row, context)
    steps = CONTENDERS[who](job)
    first = seconds(lambda: next(steps), device)
    if context.gpu:
        torch.cuda.reset_peak_memory_stats()  # without the choice of operations
    losses = [next(steps), next(steps)]
    count, taken = 0, 0.0
    while taken < context.least:
        taken += seconds(lambda: losses.extend(islice(steps, 5)), device)
        count += 5
    tokens = count * job.size.micro_batch_size * job.size.model.seq_len / taken
    work, peak = flops_per_token(job.size.model) * tokens / 1e12, peak_tflops(device, "bfloat16")
    memory = torch.cuda.max_memory_allocated() if context.gpu else 0
    path, predicted = job.folder / "operations.json", None
    chosen = read_json(path) if path.exists() else None  # only ours, on a GPU
    if who == "ours":
        machine = machine_of(World(0, 1, device), job.settings.cluster)
        predicted = Figures.predicted(predict(job.settings.models["step"], machine))
    yield {
        "step": row,
        "tokens/s": tokens,
        "ms": 1000 * taken / count,
        "predicted ms": predicted and 1000 * predicted.step_seconds,
        "MFU %": 100 * work / peak if peak else None,
        "goal": _GOALS.get(row.split(" ")[0]) if who == "ours" and not job.size.model.dropout else None,
        "TFLOP/s": work,
        "peak GB": memory / 1e9 or None,
        "predicted GB": predicted and (predicted.memory - predicted.context) / 1e9,
        "build and first step, s": first,
        "loss": float(losses[-1]),
        "operations": chosen and "; ".join([chosen["attention"], *chosen["kernels"], *chosen["reasons"]]),
    }
    steps.close()


def planning(row: str, context: Context) -> Iterator[Row]:
    """A trial: all memory of the process and the time of a step, as predicted and as measured."""
    from training.trial import run_trial

    job, output = job_of(row, context)[0], context.folder / "trial.json"
    run_trial(job.settings, "step", 5, output)
    result, both = read_json(output), ("predicted", "measured")
    memory = {f"{one} GB": result[one]["memory"] / 1e9 for one in both}
    yield {"trial": row, **memory, **{f"{one} ms": 1000 * (result[one]["step_seconds"] or nan) for one in both}}


_PARTS: Mapping[str, Callable[[str, Context], Iterator[Row]]] = {"step": step, "planning": planning}


def checkpoints(context: Context) -> Iterator[Row]:
    """Save and load of 124M, 1.5 GB, from and to the GPU; steps during a background save."""
    job, _ = job_of("124m 16 compile=none", context)
    yield from checkpoint.tables(job, context.folder, 1)


def generating(context: Context) -> Iterator[Row]:
    """124M with random weights, float32, greedy; texts may differ after nearly equal logits."""
    size, count = ("tiny", 8) if context.toy else ("124m", 128)
    yield from training.generate(Namespace(size=size, count=count, rounds=1, work=context.folder))
