"""Builds the kernels and runs the tests that need a GPU, each in its own process.

What they print goes to DIR/tests.txt while they run; a row says how they ended. Warnings are no errors here, where
versions of libraries are what the machine has.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.items import Item, Row
from training.kernels.build import FOLDER_VARIABLE, cache_folder

TITLE = "Build and tests"

_ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/training/kernels",
    "tests/training/test_gpu.py",
    "tests/training/parallel/test_randomness.py",
    "tests/training/dataset/test_batches.py",
)
"""Folders and files of tests with cases for a GPU."""
_WORKERS = 6  # processes that share the GPU: most of a test is compilation, on a CPU


def items(toy: bool) -> list[Item]:
    """The build, then the tests."""
    return [Item("tests", "build", 45, on_cpu=False), Item("tests", "pytest -m gpu", 30 if toy else 100)]


def run(item: Item, limit: float, gpu: bool, log: Path) -> Row:
    """Run a command with its output in `log`; it is ended after `limit` seconds."""
    command = [sys.executable, "-m"]
    if item.name == "build":
        command += ["training.kernels", "build"]
    else:
        command += ["pytest", "-m", "gpu", "-ra", "-W", "default", "-p", "no:cacheprovider", *TESTS]
        command += ["-n", str(_WORKERS)] if gpu and find_spec("xdist") else []
    begun = time.monotonic()
    with log.open("ab") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # one cache: the tests need not compile what was built
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(_ROOT), *_paths()]),
                FOLDER_VARIABLE: str(cache_folder()),
            },
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
    return {
        "command": " ".join(["python", *command[1:5]]),
        "ended": ended,
        "s": time.monotonic() - begun,
        "last line": _last_line(log),
    }


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _last_line(log: Path) -> str:
    lines = [line.strip(" =") for line in log.read_text(errors="replace").splitlines() if line.strip(" =")]
    return lines[-1].replace("|", "/") if lines else ""
