"""Items of the GPU benchmark, each run in its own process, and those that need no training.

All data are random: products of zeros run faster.
"""

import faulthandler
import os
import random
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Row
from common import job_log
from common.errors import ToolkitError

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/training/kernels",
    "tests/training/test_gpu.py",
    "tests/training/parallel/test_randomness.py",
    "tests/training/dataset/test_batches.py",
)
"""Tests with cases for a GPU."""

# (M, N, K) of M x K times K x N: a large one, then those of 345M's MLP and head at micro-batch 16
_PRODUCTS = {"large": (8192, 8192, 8192), "up": (16384, 4096, 1024), "head": (16384, 50304, 1024)}


@dataclass(frozen=True)
class Context:
    """Where and how items run."""

    folder: Path
    """A temporary folder."""
    toy: bool
    gpu: bool = False
    least: float = 0.1
    """Least seconds of a timing."""
    blocking: bool = False
    """CUDA_LAUNCH_BLOCKING: an error is raised where it happened."""

    @property
    def device(self) -> "torch.device":
        """Where to measure."""
        import torch

        return torch.device("cuda" if self.gpu else "cpu")


@dataclass(frozen=True)
class Item:
    """Rows of one table, measured in their own process; a failure affects no other item."""

    part: str
    name: str
    run: Callable[[Context], Iterator[Row]]
    limit: float = 120.0
    """Seconds until it is killed."""
    vital: bool = False
    """Whether no table follows if it fails."""


def seconds(run: Callable[[], object], device: "torch.device") -> float:
    """Duration of `run()` with all work that it queues on the device."""
    import torch

    wait = torch.cuda.synchronize if device.type == "cuda" else bool
    wait()
    begun = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - begun


def describe(pipe: Connection) -> None:
    """Send whether there is a GPU, and `NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0`."""
    import torch

    gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else f"{os.cpu_count()} CPUs"
    pipe.send((gpu, f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}"))


def send_rows(pipe: Connection, run: Callable[[Context], Iterator[Row]], context: Context, log: Path) -> None:
    """Send the rows of an item, then None, or the reason why it failed.

    `log` gets all output, also of commands that it runs, tracebacks, and the stacks at a crash or
    SIGABRT.
    """
    os.setsid()  # killing the group ends its commands, too
    for number in (1, 2):
        os.dup2(os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(2)
    os.environ |= {"PYTHONFAULTHANDLER": "1", **({"CUDA_LAUNCH_BLOCKING": "1"} if context.blocking else {})}
    if not context.gpu:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling for a CPU takes longer than all the rest of a rehearsal
        os.sched_setaffinity(0, {random.choice(sorted(os.sched_getaffinity(0)))})  # waiting threads are slow
    from training.launch.device import choose_device, set_threads
    from training.launch.rank import read_launch

    set_threads(read_launch(), 0)
    try:
        if context.gpu:
            choose_device(read_launch())  # also sets how memory is allocated
        for row in run(context):
            pipe.send(row)
        pipe.send(None)
    except Exception as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")


def start(*words: object, under: Sequence[str] = (), **env: str) -> "subprocess.Popen[bytes]":
    """Start `python -m WORDS` in the project's root, `under` another program."""
    command = [*under, sys.executable, "-m", *map(str, words)]
    print(f"$ {' '.join(command)}", flush=True)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **env}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL)


def finish(process: "subprocess.Popen[bytes]") -> None:
    """Wait for a command. Raises ToolkitError if it fails."""
    if code := process.wait():
        *_, command = " ".join(process.args).rpartition(" -m ")  # type: ignore[arg-type]
        raise ToolkitError(f"{command}: exit code {code}: {last_line()}")


def last_line() -> str:
    """The last line of the item's log."""
    return job_log.last_lines(Path("/proc/self/fd/1"))[0][-1] or "it printed nothing"


def pytest_runtest_logreport(report: Any) -> None:
    """Print a failure at once, as a pytest plugin: a time-out may come before pytest's summary."""
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)


def tests(context: Context) -> Iterator[Row]:
    """The tests that need a GPU, quick ones first."""
    from training.kernels.build import FOLDER_VARIABLE, cache_folder

    words = ["-W", "default", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.items", "--durations=20"]
    # tests mostly compile, on a CPU
    words += ["-n", str(min(8, os.cpu_count() or 1))] if context.gpu and find_spec("xdist") else []
    # one cache: the tests need not compile what was built
    finish(start("pytest", "-m", "gpu", *words, *TESTS, **{FOLDER_VARIABLE: str(cache_folder())}))
    yield {"command": "pytest -m gpu", "last line": last_line().strip(" =").replace("|", "/")}


def machine(context: Context) -> Iterator[Row]:
    """Bandwidth of a copy (bytes read and written); matrix products in bfloat16, one in float32."""
    import torch

    from training.kernels.cases import milliseconds

    def rate(amount: int, unit: str, run: Callable[[], object]) -> Row:
        taken = milliseconds(run, context.least)
        return {"ms": taken, "TB/s": None, "TFLOP/s": None, unit: amount / taken / 1e9}

    source = torch.randn(2**16 if context.toy else 2**30, device=context.device)  # 4.3 GB: many times any cache
    target = torch.empty_like(source)
    moved = 2 * source.nbytes
    yield {"device": "copy", "of": f"{source.nbytes:,} bytes", **rate(moved, "TB/s", lambda: target.copy_(source))}
    for name, dtype in [*((name, torch.bfloat16) for name in _PRODUCTS), ("large", torch.float32)]:
        rows, columns, inner = (size // 128 if context.toy else size for size in _PRODUCTS[name])
        left = torch.randn(rows, inner, device=context.device, dtype=dtype)
        right = torch.randn(columns, inner, device=context.device, dtype=dtype)
        product = torch.empty(rows, columns, device=context.device, dtype=dtype)
        run = partial(torch.mm, left, right.t(), out=product)
        yield {
            "device": f"{str(dtype).removeprefix('torch.')} product, {name}",
            "of": f"{rows} x {columns} x {inner}",
            **rate(2 * rows * columns * inner, "TFLOP/s", run),
        }


def kernels(context: Context) -> Iterator[Row]:
    """Our kernels at 345M, micro-batch 32 (no tensor fits a cache), eager and compiled.

    The bytes of a kernel are the least that its forward and backward pass must move.
    """
    import torch

    from training.kernels import library
    from training.kernels.cases import Shapes, cases, milliseconds, runner, time_op

    if context.gpu and (missing := library.prepare()):
        raise ToolkitError(missing)
    toy = Shapes(samples=1, seq_len=16, n_layer=1, n_embd=32, vocabulary=64)
    for case in cases(toy if context.toy else Shapes(samples=32), context.device):
        least, compiled = context.least / 2, None  # a row has two timings or more
        ours, eager = time_op(case, True, least), time_op(case, False, least)
        if context.gpu and case.part != "optimizer":
            forward: Any = torch.compile(case.plain or case.forward, dynamic=False)
            with library.using(()):
                compiled = milliseconds(runner(case, forward), least)
        yield {
            "kernel": case.kernel,
            "ours, ms": ours,
            "eager, ms": eager,
            "compiled, ms": compiled,
            "TB/s": case.bytes / ours / 1e9,
            "speed beside the faster other": min(eager, compiled or eager) / ours,
        }
