"""Fixtures for every test: a clean environment, and commands run as by a user."""

import fcntl
import ipaddress
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers import PATIENCE

# tests run in parallel: threads that wait for a core make operations on tiny tensors ten times
# slower
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `nohup make test` ignores SIGHUP, `make test &` in a script SIGINT, and so would the runs that
# tests interrupt
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent

ORDER = os.environ.get("TEST_ORDER_SEED", "")
"""Shuffles the files, and the tests in each, if it is set: TEST_ORDER_SEED=7 make test."""
FIXTURES = 1800
"""Seconds that the fixtures of a test may take; the test itself has pytest's `timeout`.

The fixture that runs the whole demo would need most of the first test's time on a busy machine.
"""

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Once = Callable[[str, Callable[[Path], object]], Path]


# These begin first, so that none of them is left over at the end. test_all.py builds
# `finished_run`.
LONGEST = (
    "workflow/test_all.py",
    "slurm/test_training.py",
    "cluster/test_local.py",
    "training/test_parity.py",
    "workflow/test_snakefile.py",
    "workflow/test_rerun.py",
    "workflow/test_sources.py",
    "corpus_jobs/test_executor.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws the same examples each time in the gate, `-m "not slow"`, and new ones in
    every other run.
    """
    gate = config.option.markexpr == "not slow"
    slow_machine = [HealthCheck.too_slow]  # is no failure
    settings.register_profile(
        "project", deadline=None, derandomize=gate, print_blob=True, suppress_health_check=slow_machine
    )
    settings.load_profile("project")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first, or shuffle all; keep together what shares a
    fixture.

    `--dist loadgroup` gives every test to whichever worker is free. Tests of a file that use one of
    its module-wide fixtures form a group, so that the fixture is built once.
    """
    if ORDER:
        rng = random.Random(ORDER)  # every worker draws the same
        files = {path: rng.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (files[item.path], rng.random()))
    else:
        ranks = {item: next((n for n, end in enumerate(LONGEST) if str(item.path).endswith(end)), 99) for item in items}
        items.sort(key=ranks.__getitem__)
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if any(definition.scope == "module" for definitions in fixtures for definition in definitions):
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(ROOT))))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in which order the tests ran."""
    if ORDER:
        terminalreporter.write_line(f"files in the order of TEST_ORDER_SEED={ORDER}")


@contextmanager
def _time_limit(item: pytest.Item) -> Iterator[None]:
    """End the fixtures of a test after FIXTURES seconds."""

    def expired(*_: object) -> None:
        pytest.fail(f"the fixtures of {item.nodeid} take more than {FIXTURES} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(FIXTURES)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Skip tests with `@pytest.mark.gpu` on a machine without a GPU."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    with _time_limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fixtures end within their limit, too."""
    with _time_limit(item):
        return (yield)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the job, cluster and proxy settings of the shell from every test."""
    for name in list(os.environ):
        if name.startswith(
            ("SLURM_", "SUBMITIT_", "MASTER_", "TORCHELASTIC_", "URLS_TO_GPT2_")
        ) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test connects to an address other than loopback."""
    connect = socket.socket.connect

    def connect_to_loopback(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            host = "127.0.0.1" if address[0] == "localhost" else address[0]
            assert ipaddress.ip_address(host).is_loopback, f"a test connects to {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_to_loopback)


def _files(folder: Path) -> list[str]:
    """Every file below a folder, with its size and time."""
    paths = (Path(where, name) for where, _, names in os.walk(folder) for name in names if name != ".built")
    found = ((path, path.lstat()) for path in paths)
    return sorted(f"{path} {status.st_size} bytes {status.st_mtime_ns}" for path, status in found)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Once]:
    """`once(name, build)` is a folder that `build(folder)` fills once, for all workers: copy it, do
    not change it.

    A test that changes something works on a copy, so that no test depends on another. The end of
    the session fails if one did not, also by a command that only reads but keeps a cache there.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    used = set[Path]()

    def made(name: str, build: Callable[[Path], object]) -> Path:
        folder = shared / f"once-{name}"
        with (shared / f"once-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / ".built").exists():
                shutil.rmtree(folder, ignore_errors=True)  # a build that failed fails again, with its reason
                folder.mkdir()
                build(folder)
                (folder / ".built").write_text("\n".join(_files(folder)))
        used.add(folder)
        return folder

    yield made
    for folder in used:
        changed = set((folder / ".built").read_text().splitlines()) ^ set(_files(folder))
        assert not changed, f"a test changed {folder}, which others share; let it work on a copy: {sorted(changed)[:4]}"


@pytest.fixture(scope="session")
def tiny_run(once: Once) -> Path:
    """The folder of a finished training: `config.yaml`, `dataset/`, and `models/tiny` with
    checkpoints at 10 and 20.

    Two tensor-parallel processes, dropout, 20 iterations, validation every 10.
    `tests.training.helpers.copy_run` copies it.
    """
    from tests.training.helpers import launch_ok, make_run

    def build(folder: Path) -> None:
        train = {"iterations": 20, "save_interval": 10, "eval_interval": 10}
        config = make_run(folder, parallel={"tensor": 2}, model={"dropout": 0.1}, train=train)
        results = launch_ok(2, "training.train", "--config", config, "--model", "tiny")
        (folder / "stdout").write_text(results[0].stdout)

    return once("tiny_run", build)


@pytest.fixture(scope="session")
def finished_run(once: Once) -> Path:
    """A working folder in which the demo has finished, from a site's URLs to text and report:
    `results/x`.

    The site in `site/` has 12 chapters, eight exact and eight near copies, and every odd page; two
    shards; the model `tiny` was trained by two processes. What the command printed is in `stdout`.
    """
    from tests.workflow import pipeline

    return once("finished_run", pipeline.build)


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Run `python -m MODULE ARGUMENTS…` in the repository, with a time limit."""

    def run(
        module: str, *arguments: object, timeout: float = PATIENCE, cwd: Path = ROOT
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            },
        )

    return run
