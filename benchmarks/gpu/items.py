"""What the GPU benchmark consists of, and its parts that need no training: the device, kernels, and tests.

Every row is on random data: products of zeros run faster.
"""

import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Row

if TYPE_CHECKING:
    import torch

_ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/training/kernels",
    "tests/training/test_gpu.py",
    "tests/training/parallel/test_randomness.py",
    "tests/training/dataset/test_batches.py",
)
"""Folders and files of tests with cases for a GPU."""

# (M, N, K) of M x K times K x N: a large one, then those of 345M's MLP and head at micro-batch 16
_PRODUCTS = {"large": (8192, 8192, 8192), "up": (16384, 4096, 1024), "head": (16384, 50304, 1024)}


@dataclass(frozen=True)
class Context:
    """What items know of the machine."""

    folder: Path
    """A temporary folder."""
    toy: bool
    gpu: bool = False

    @property
    def device(self) -> "torch.device":
        """Where to measure."""
        import torch

        return torch.device("cuda" if self.gpu else "cpu")

    @property
    def least(self) -> float:
        """Seconds that a row is timed at least: a GPU under load is slower after some seconds than at first."""
        return 0.1 if self.toy else 10.0


@dataclass(frozen=True)
class Item:
    """One measurement, in a process of its own; its failure or time-out leaves all others untouched."""

    part: str
    name: str
    run: Callable[[Context], Iterator[Row]] | None
    """None: a command of `run_tests`."""
    limit: float = 240.0
    """Seconds after which it is ended."""


def seconds(run: Callable[[], object], device: "torch.device") -> float:
    """Duration of `run()` with all work that it gives to the device; waits before and after, not in between."""
    import torch

    wait = torch.cuda.synchronize if device.type == "cuda" else bool
    wait()
    begun = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - begun


# ------------------------------------------------------------------------------------------------ the processes


def describe(pipe: Connection) -> None:
    """Send whether there is a GPU, and `NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0`."""
    import torch

    gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else f"{os.cpu_count()} CPUs"
    pipe.send((gpu, f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}"))


def send_rows(pipe: Connection, run: Callable[[Context], Iterator[Row]], context: Context) -> None:
    """Send the rows of an item; at last None, or a text that says why it failed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the trainer's log
    if not context.gpu:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling for a CPU takes longer than all the rest of a rehearsal
        os.sched_setaffinity(0, {random.choice(sorted(os.sched_getaffinity(0)))})  # waiting threads are slow
    from training.launch.device import set_threads
    from training.launch.rank import read_launch

    set_threads(read_launch(), 0)
    try:
        for row in run(context):
            pipe.send(row)
        pipe.send(None)
    except Exception as error:
        trace = "\n".join(traceback.format_exc().splitlines()[-25:])
        pipe.send(f"{type(error).__name__}: {error}\n{trace}")


def run_tests(name: str, limit: float, gpu: bool, log: Path) -> Row:
    """Build the kernels (`build`), or run the tests that need a GPU, with the output in `log`; ended after `limit` s.

    Warnings are no errors here, where versions of libraries are what the machine has.
    """
    from training.kernels.build import FOLDER_VARIABLE, cache_folder

    command = [sys.executable, "-m", "training.kernels", "build"]
    if name != "build":
        command[2:] = ["pytest", "-m", "gpu", "-ra", "-W", "default", "-p", "no:cacheprovider", *TESTS]
        command += ["-n", "6"] if gpu and find_spec("xdist") else []  # most of a test is compilation, on a CPU
    paths = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    # one cache: the tests need not compile what was built
    environment = {**os.environ, "PYTHONPATH": paths, FOLDER_VARIABLE: str(cache_folder())}
    begun = time.monotonic()
    with log.open("ab") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        try:
            code = subprocess.run(command, cwd=_ROOT, env=environment, timeout=limit, **options).returncode
            ended = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"ended after {limit:.0f} s"
    lines = [line.strip(" =") for line in log.read_text(errors="replace").splitlines() if line.strip(" =")]
    taken = time.monotonic() - begun
    return {"command": name, "ended": ended, "s": taken, "last line": lines[-1].replace("|", "/")}


# ------------------------------------------------------------------------------------------------ the device


def machine(context: Context) -> Iterator[Row]:
    """The bandwidth of a copy, which reads and writes its bytes; matrix products in bfloat16, and one in float32."""
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


# ------------------------------------------------------------------------------------------------ kernels


def kernels(context: Context) -> Iterator[Row]:
    """Our kernels at 345M, micro-batch 32, where no tensor fits a cache, beside PyTorch and its compiler.

    A kernel's bytes are what its forward and backward pass must move at least.
    """
    import torch

    from common.errors import JobError
    from training.kernels import library
    from training.kernels.cases import Shapes, cases, milliseconds, runner, time_op

    if context.gpu and (missing := library.prepare()):
        raise JobError(missing)
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
