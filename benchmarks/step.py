"""An optimiser step: ours against transformers and a plain loop in the manner of nanoGPT; then ours on 2 processes.

A step is forward, backward, clipping and fused AdamW, without dropout, on the same samples. Ours is the trainer's own
step, including reading its data; the peers are `transformers`' GPT2LMHeadModel (SDPA attention) and the shortest GPT-2
that one can write. All have the vocabulary that our layout pads 50,257 to, 50,304. Rows take turns, each in its own
processes (4 GB each at 124M), and a ratio is the median over the rounds, so that other load affects all rows alike.
On CPUs everything is float32, on all cores; two processes share them, and one process gets the micro-batches of both.
Ours lets glibc keep freed memory, as the trainer always does; the peers run as their users run them.
With a GPU it is 345M in bfloat16: ours compiles each layer, the peer compiles the whole model, which are the defaults.

FLOPs per token are 6 (N - wpe) + 12 L h s, with attention counted in full (Narayanan et al. 2021, appendix, without its
recomputation): 2.425 G at 345M. The peak is the speed of float32 products of large matrices, measured in the same
run, or the 989 TFLOP/s of an H100 and an H200 for dense bfloat16.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.machine import table
from benchmarks.step_peers import MATRIX, Steps, matrices, nanogpt, transformers
from benchmarks.training_job import SIZES, Job, write_dataset
from common.cli import positive_int
from common.errors import JobError
from common.settings import ParallelSettings

if TYPE_CHECKING:
    from training.run_plan import Plan
    from training.step import Session

_WARMUP = 1  # steps: allocations and, on a GPU, compilation
_GPU_PEAK = 989e12  # FLOP/s

LAYOUTS = {
    "tensor 2": ParallelSettings(tensor=2),
    "tensor 2, sequence parallel": ParallelSettings(tensor=2, sequence_parallel=True),
    "data 2, ZeRO 0": ParallelSettings(data=2),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--size", choices=SIZES, action="append", help="default: 345m with a GPU, else small and 124m")
    parser.add_argument(
        "--steps", type=positive_int, metavar="N", help="steps per round (default 2 at small, 1 at 124m)"
    )
    parser.add_argument("--rounds", type=positive_int, default=5, metavar="N", help="rounds per row (default 5)")


@contextmanager
def opened(job: Job) -> "Iterator[tuple[Plan, Session]]":
    """Our trainer's model and optimiser, with the operations that it chooses, as a training opens them."""
    from training.operations import choose_operations
    from training.parallel.launch import read_launch
    from training.parallel.process_group import started
    from training.run_plan import make_plan
    from training.trainer import open_session

    with started(read_launch(), job.folder) as world:
        plan = make_plan(job.settings, "step")
        choose_operations(plan.experiment, world, job.folder)
        yield plan, open_session(plan.experiment, world)


def ours(job: Job) -> Steps:
    """The step of our trainer."""
    from training.step import step_batches, train_step

    with opened(job) as (plan, session):
        for iteration, batches in enumerate(step_batches(session, plan.data.train, 0), 1):
            yield train_step(session, iteration, batches, job.lr).loss
            session.timers.collect()


def _serve(steps: Callable[[Job], Steps], job: Job, rank: int, processes: int, pipe: Connection) -> None:
    """Run as many steps as the pipe asks for, and answer with their duration in seconds."""
    os.environ |= {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": "step",
        "SUBMITIT_LOCAL_NTASKS": str(processes),
        "SUBMITIT_LOCAL_GLOBALID": str(rank),
        "SUBMITIT_LOCAL_LOCALID": str(rank),
    }
    running = steps(job)
    while number := pipe.recv():
        started = time.perf_counter()
        *_, loss = islice(running, number)
        float(loss)  # waits for the device
        pipe.send(time.perf_counter() - started)


@contextmanager
def processes(steps: Callable[[Job], Steps], job: Job) -> Iterator[Callable[[int], float]]:
    """Start the processes of a row; yields a function that runs N steps and returns the seconds of the slowest process.

    The function raises JobError if a process has ended.
    """
    spawn = multiprocessing.get_context("spawn")
    size = job.settings.models["step"].world_size
    pipes, tasks = [], []
    try:
        for rank in range(size):
            mine, theirs = spawn.Pipe()
            tasks.append(spawn.Process(target=_serve, args=(steps, job, rank, size, theirs)))
            tasks[-1].start()
            theirs.close()  # so that the end of a process is noticed
            pipes.append(mine)

        def run(number: int) -> float:
            try:
                for pipe in pipes:
                    pipe.send(number)
                return max(float(pipe.recv()) for pipe in pipes)
            except (EOFError, OSError):
                raise JobError(
                    f"{steps.__name__}: a process of the benchmark ended; what it printed says why"
                ) from None

        yield run
    finally:
        for task in tasks:
            task.kill()
            task.join()


def seconds(rows: Mapping[str, tuple[Callable[[Job], Steps], Job]], steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each row, one value per round. Rows take turns; the others wait meanwhile."""
    with ExitStack() as stack:
        runs = {label: stack.enter_context(processes(*row)) for label, row in rows.items()}
        for run in runs.values():
            run(_WARMUP)
        times: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(rounds):
            for label, run in runs.items():
                times[label].append(run(steps) / steps)
    return times


def ratio(times: list[float], to: list[float]) -> float:
    """Speed relative to the row `to`: the median of the rounds' ratios."""
    return median(other / own for own, other in zip(times, to, strict=True))


def beside_peers(name: str, job: Job, steps: int, rounds: int, gpu: bool) -> list[dict[str, str]]:
    """Rows of our step and its peers, one process each."""
    peers = {"nanoGPT-style, compiled": nanogpt} if gpu else {"transformers": transformers, "nanoGPT-style": nanogpt}
    machine = {} if gpu else {"matrices": matrices}
    times = seconds({label: (row, job) for label, row in {**peers, "ours": ours, **machine}.items()}, steps, rounds)
    fastest = min(peers, key=lambda label: median(times[label]))
    tokens = job.size.micro_batch_size * job.size.model.seq_len
    work = job.size.flop_per_token * tokens
    rows = []
    for label in (*peers, "ours"):
        peaks = [_GPU_PEAK if gpu else 2 * MATRIX**3 / each for each in times.get("matrices", times[label])]
        share = median(work / own / peak for own, peak in zip(times[label], peaks, strict=True))
        rows.append(
            {
                "size": name,
                "step": label,
                "tokens": f"{tokens:,}",
                "tokens/s": f"{tokens / median(times[label]):,.0f}",
                "of the faster peer": f"{ratio(times[label], times[fastest]):.3f}",
                "GFLOP/token": f"{job.size.flop_per_token / 1e9:.3f}",
                "of the peak": f"{share:.1%}",
            }
        )
    return rows


def on_two_processes(name: str, job: Job, steps: int, rounds: int) -> list[dict[str, str]]:
    """Rows of layouts, each measured against one process, because all at once would not fit a laptop's memory."""
    rows = []
    for label, parallel in LAYOUTS.items():
        pair = {"alone": (ours, job), "layout": (ours, job._replace(parallel=parallel))}
        times = seconds(pair, steps, rounds)
        tokens = job.micro_batches * job.size.micro_batch_size * job.size.model.seq_len
        alone, layout = (tokens / median(times[key]) for key in pair)
        rows.append(
            {
                "size": name,
                "2 processes": label,
                "tokens": f"{tokens:,}",
                "tokens/s": f"{layout:,.0f}",
                "one process, tokens/s": f"{alone:,.0f}",
                "ratio": f"{ratio(times['layout'], times['alone']):.3f}",
            }
        )
    return rows


def measure(arguments: argparse.Namespace) -> str:
    """Tables of tokens per second, for each size."""
    import torch

    gpu = torch.cuda.is_available()
    beside, spread = [], []
    for name in arguments.size or (["345m"] if gpu else ["small", "124m"]):
        size = SIZES[name]
        steps = arguments.steps or size.steps
        with TemporaryDirectory() as folder:
            job = Job(Path(folder), size)
            write_dataset(job)
            beside += beside_peers(name, job, steps, arguments.rounds, gpu)
            if not gpu:
                spread += on_two_processes(name, job._replace(micro_batches=2), steps, arguments.rounds)
    return "\n\n".join(table(rows) for rows in (beside, spread) if rows)
