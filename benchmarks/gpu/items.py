"""What the GPU benchmark consists of, and its parts that need no training: the device, kernels, the loss, and tests.

Every row is on random data: products of zeros run faster.
"""

import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Row, Timed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/training/kernels",
    "tests/training/test_gpu.py",
    "tests/training/parallel/test_randomness.py",
    "tests/training/dataset/test_batches.py",
)
"""Folders and files of tests with cases for a GPU."""

# (M, N, K) of M x K times K x N: a large one, then 345M's at micro-batch 16: qkv, out, up, down, head, and the
# gradients of the weights of up and of the head
_PRODUCTS = {
    "large": (8192, 8192, 8192),
    "qkv, K = 1,024": (16384, 3072, 1024),
    "out, K = 1,024": (16384, 1024, 1024),
    "up, K = 1,024": (16384, 4096, 1024),
    "down, K = 4,096": (16384, 1024, 4096),
    "head, K = 1,024": (16384, 50304, 1024),
    "gradient of up's weight": (4096, 1024, 16384),
    "gradient of the head's weight": (50304, 1024, 16384),
}


@dataclass(frozen=True)
class Context:
    """What items know of the machine and of earlier items."""

    folder: Path
    """A temporary folder."""
    toy: bool
    gpu: bool = False
    rows: Mapping[str, list[Row]] = field(default_factory=dict)
    """The rows of each part so far."""

    @property
    def device(self) -> "torch.device":
        """Where to measure."""
        import torch

        return torch.device("cuda" if self.gpu else "cpu")

    def ceiling(self, kind: str, unit: str) -> float | None:
        """The fastest row of the device of a kind (`copy`, `bfloat16`); None if there is none or no GPU."""
        found = [row[unit] * 1e12 for row in self.rows.get("machine", ()) if str(row.get("device")).startswith(kind)]
        return max(found, default=None) if self.gpu else None


@dataclass(frozen=True)
class Item:
    """One measurement, in a process of its own; its failure or time-out leaves all others untouched."""

    part: str
    name: str
    run: Callable[[Context], Iterator[Row]]
    seconds: float = 10.0
    """How long it should take; it begins only if that much time is left, and is ended after three times as long."""


def seconds(run: Callable[[], object], device: "torch.device") -> float:
    """Duration of `run()` with all work that it gives to the device; waits before and after, not in between."""
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def median_seconds(run: Callable[[], object], device: "torch.device") -> float:
    """The median duration of 10 runs, after 3 to warm up."""
    return median([seconds(run, device) for _ in range(13)][3:])


def peak_gigabytes(device: "torch.device") -> float | None:
    """The most memory that tensors have taken since the last call, in GB of 10^9 bytes; None on CPUs."""
    import torch

    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device) / 1e9
    torch.cuda.reset_peak_memory_stats(device)
    return peak


# ------------------------------------------------------------------------------------------------ the processes


def describe() -> Timed:
    """Whether there is a GPU, and `NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0, Python 3.12.3`."""
    import torch

    gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else f"{os.cpu_count()} CPUs"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    return lambda: {"gpu": gpu, "head": f"{name}, {versions}"}


def rows_of(item: Item, context: Context) -> Timed:
    """Each call returns the next row of an item; at the end None."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the trainer's log
    if not context.gpu:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling for a CPU takes longer than all the rest of a rehearsal
        os.sched_setaffinity(0, {random.choice(sorted(os.sched_getaffinity(0)))})  # waiting threads are slow
    from training.launch.device import set_threads
    from training.launch.rank import read_launch

    set_threads(read_launch(), 0)
    rows = item.run(context)
    return lambda: next(rows, None)


# ------------------------------------------------------------------------------------------------ the device


def copy(context: Context) -> Iterator[Row]:
    """The bandwidth of a copy, which reads and writes its bytes."""
    import torch

    source = torch.randn(2**16 if context.toy else 2**30, device=context.device)  # 4.3 GB: many times any cache
    target = torch.empty_like(source)
    taken = median_seconds(lambda: target.copy_(source), context.device)
    yield {"device": "copy", "GB": source.nbytes / 1e9, "ms": taken * 1000, "TB/s": 2 * source.nbytes / taken / 1e12}


def products(context: Context) -> Iterator[Row]:
    """Matrix products in bfloat16, and a large one in float32."""
    import torch

    cases = [(name, shape, torch.bfloat16) for name, shape in _PRODUCTS.items()]
    for name, shape, dtype in [*cases, ("large", _PRODUCTS["large"], torch.float32)]:
        rows, columns, inner = (size // 128 for size in shape) if context.toy else shape
        left = torch.randn(rows, inner, device=context.device, dtype=dtype)
        right = torch.randn(columns, inner, device=context.device, dtype=dtype)
        product = torch.empty(rows, columns, device=context.device, dtype=dtype)

        def multiply(left: "Tensor" = left, right: "Tensor" = right, product: "Tensor" = product) -> object:
            return torch.mm(left, right.t(), out=product)

        taken = median_seconds(multiply, context.device)
        yield {
            "device": f"{str(dtype).removeprefix('torch.')} product, {name}",
            "shape": f"{rows} x {columns} x {inner}",
            "ms": taken * 1000,
            "TFLOP/s": 2 * rows * columns * inner / taken / 1e12,
        }


# ------------------------------------------------------------------------------------------------ kernels and the loss


def kernels(context: Context) -> Iterator[Row]:
    """Our kernels at 345M, micro-batch 8, beside PyTorch and its compiler, and the bandwidth of a copy.

    A kernel's bytes are what its forward and backward pass must move at least.
    """
    from common.errors import JobError
    from training.kernels import library
    from training.kernels.cases import Shapes, measure

    if context.gpu and (missing := library.prepare()):
        raise JobError(missing)
    toy: dict[str, Any] = {"samples": 1, "seq_len": 16, "n_layer": 1, "n_embd": 32}
    toy |= {"vocabulary": 60, "padded_vocabulary": 64}
    bandwidth = context.ceiling("copy", "TB/s")
    for row in measure(Shapes(**toy) if context.toy else Shapes(), context.device, compiled=context.gpu):
        rate = row["bytes"] / (row["ours"] / 1000)
        others = [time for time in (row["eager"], row["compile"]) if time is not None]
        yield {
            "kernel": row["kernel"],
            "ours, ms": row["ours"],
            "eager, ms": row["eager"],
            "compiled, ms": row["compile"],
            "GB": row["bytes"] / 1e9,
            "GB/s": rate / 1e9,
            "of a copy %": 100 * rate / bandwidth if bandwidth else None,
            "speed beside the faster other": min(others) / row["ours"],
        }


def losses(context: Context) -> Iterator[Row]:
    """Head and cross-entropy of 345M at micro-batch 16, both passes; the peak without inputs and gradients."""
    import torch
    from torch.nn import functional as F

    from training.loss import LossHead
    from training.parallel.sizes import CHUNKS, peak_bytes

    device = context.device
    tokens, width, rows, true = (64, 32, 128, 100) if context.toy else (16384, 1024, 50304, 50257)
    x = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(rows, width, device=device)).requires_grad_()
    targets = torch.randint(true, (1, tokens), device=device)
    whole, chunked = LossHead(true), LossHead(true, CHUNKS)
    compiled = torch.compile(whole, dynamic=False)
    forms: dict[str, Callable[[], Tensor]] = {
        "whole, compiled": lambda: compiled(x, weight, targets),
        "whole, eager": lambda: whole(x, weight, targets),
        "chunked": lambda: chunked(x, weight, targets),
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 has it, 2.11 does not
        theirs: Any = F.linear_cross_entropy
        matrix = weight.detach().to(x.dtype).requires_grad_()
        forms["PyTorch's linear_cross_entropy"] = lambda: theirs(x[0], matrix, targets[0], reduction="sum")
    for name, loss in forms.items():

        def step(loss: "Callable[[], Tensor]" = loss) -> None:
            x.grad = weight.grad = None
            loss().backward()  # type: ignore[no-untyped-call]

        step()
        x.grad = weight.grad = None
        before = torch.cuda.memory_allocated(device) / 1e9 if context.gpu else 0.0
        peak_gigabytes(device)
        taken = median_seconds(step, device)
        peak, gradients = peak_gigabytes(device), (x.nbytes + weight.nbytes) / 1e9
        chunks = CHUNKS if name == "chunked" else 1
        planned = peak_bytes(tokens, width, rows, x.element_size(), chunks, compiled="compiled" in name)
        yield {
            "loss": name,
            "tokens": tokens,
            "ms": taken * 1000,
            "peak GB": None if peak is None else max(0.0, peak - before - gradients),
            "planned GB": None if "PyTorch" in name else planned / 1e9,
            "value": float(loss().detach()) / tokens,
        }


# ------------------------------------------------------------------------------------------------ build and tests


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
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            ended = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"ended after {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # its whole session: compilers, pytest's workers
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line.strip(" =") for line in log.read_text(errors="replace").splitlines() if line.strip(" =")]
    taken = time.monotonic() - begun
    return {"command": name, "ended": ended, "s": taken, "last line": lines[-1].replace("|", "/")}
