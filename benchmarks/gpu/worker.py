"""The process that measures: it runs items until one fails in a way that may have left the GPU unusable.

    with closing(Worker()) as worker:
        for message in worker.run(item, context, limit=60):
            ...

A kernel with a defect makes every later call of its process fail, and a hang is ended only with its process; the next
item then begins in a new one.
"""

import os
import traceback
from collections.abc import Iterator, Mapping
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import ModuleType
from typing import Literal, NamedTuple

from benchmarks.gpu.items import Context, Item, LeftOutError, Row

_START = 180.0  # seconds to import torch and reach the GPU


class Message(NamedTuple):
    """What a worker says of an item."""

    kind: Literal["row", "left out", "failed"]
    row: Row = {}  # noqa: RUF012
    text: str = ""


class Device(NamedTuple):
    """Where it measures."""

    gpu: bool
    head: str
    """Device, driver, versions of torch, CUDA and Python."""


class Worker:
    """The parent's side; a process is started when one is needed."""

    def __init__(self, toy: bool, parts: str = "benchmarks.gpu.parts") -> None:
        """`parts`: the module whose PARTS have the items' functions."""
        self._toy, self._parts = toy, parts
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self.device: Device | None = None

    def start(self) -> Device:
        """Start the process if there is none. Raises OSError or EOFError if it cannot reach its device."""
        if self._pipe is None:
            spawn = get_context("spawn")
            self._pipe, theirs = spawn.Pipe()
            self._process = spawn.Process(target=_serve, args=(theirs, self._toy, self._parts))
            self._process.start()
            theirs.close()  # so that the end of the process is noticed
            if not self._pipe.poll(_START):
                self.close()
                raise OSError(f"no answer in {_START:.0f} s")
            self.device = self._pipe.recv()
        assert self.device is not None
        return self.device

    def run(self, item: Item, context: Context, limit: float) -> Iterator[Message]:
        """What an item yields; if it takes longer than `limit` seconds without a row, or dies, that is its failure."""
        if item.alone:
            self.close()
        self.start()
        assert self._pipe is not None
        ended = False
        try:
            self._pipe.send((item, context))
            while not ended:
                if not self._pipe.poll(limit):
                    yield Message("failed", text=f"ended after {limit:.0f} s without a row")
                    break
                message: Message | None = self._pipe.recv()
                ended = message is None
                if message is not None:
                    yield message
                    if message.kind == "failed" and context.gpu:
                        break
        except (EOFError, OSError):
            yield Message("failed", text=f"its process ended{self._code()}")
        if item.alone or not ended:
            self.close()

    def _code(self) -> str:
        if self._process is not None:
            self._process.join(5)
            return f" with exit code {self._process.exitcode}"
        return ""

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection, toy: bool, module: str) -> None:
    """In the new process: answer the parent until it is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the trainer's log
    from training.parallel.device import set_threads
    from training.parallel.launch import read_launch

    set_threads(read_launch(), 0)  # before torch is imported
    import torch

    from benchmarks.gpu.steps import clean_up

    parts = import_module(module).PARTS
    gpu = torch.cuda.is_available()
    if toy and not gpu:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling for a CPU takes longer than all the rest of a rehearsal
        if hasattr(os, "sched_setaffinity"):  # threads that wait for a core make tiny operations a hundred times slower
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            torch.set_num_threads(1)
    pipe.send(Device(gpu, describe()))
    while True:
        try:
            item, context = pipe.recv()
        except EOFError:
            return
        usable = _run(parts, item, context, pipe)
        if not usable:
            return
        clean_up()
        pipe.send(None)


def _run(parts: Mapping[str, ModuleType], item: Item, context: Context, pipe: Connection) -> bool:
    """Run an item; returns whether the process can go on."""
    try:
        for row in parts[item.part].run(item, context):
            pipe.send(Message("row", row))
    except LeftOutError as error:
        pipe.send(Message("left out", text=str(error)))
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        if isinstance(error, MemoryError) or "out of memory" in first.lower():  # the trainer's, PyTorch's or CUDA's
            pipe.send(Message("left out", text=f"out of memory ({first})"))
            return True
        trace = traceback.format_exc().splitlines()[-25:]
        pipe.send(Message("failed", text="\n".join([f"{type(error).__name__}: {first}", *trace])))
        return not context.gpu
    return True


def describe() -> str:
    """`NVIDIA H200, driver 580.1, torch 2.11.0+cu130, CUDA 13.0, Python 3.12.3`."""
    import platform
    import subprocess

    import torch

    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    if not torch.cuda.is_available():
        return f"{os.cpu_count()} CPUs, {versions}"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "not known"
    return f"{torch.cuda.get_device_name()}, driver {driver}, {versions}"
