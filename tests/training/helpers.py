"""A corpus of real text as bytes, a tiny model, and jobs of several processes on this machine."""

import importlib
import lzma
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from common.config import load_settings
from common.files import read_json, read_rows, write_json
from common.settings import Settings
from common.vocabulary import CHARACTERS, END_OF_TEXT, VocabularyFiles
from corpus.index import IndexWriter, Meta
from tests.helpers import PATIENCE, Main, run_main, wait_for
from training import checkpoint, session, step
from training.checkpoint import Progress
from training.checkpoint.writing import CheckpointWriter
from training.dataset.batches import Batch
from training.launch.process_group import World, started
from training.launch.rank import read_launch
from training.planning.run import Plan, make_plan
from training.step import StepResult, train_step

Capsys = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_len": 8}  # a model that is only there
BYTE_VOCABULARY = 257  # every byte, and 256 to end a text; no multiple of 128, so that layouts must pad


def byte_documents(count: int) -> list[np.ndarray]:
    """English documents of different lengths, one token per byte, each ended by token 256."""
    text = lzma.decompress((Path(__file__).parent / "english.txt.xz").read_bytes())
    lengths = np.random.RandomState(0).randint(20, 400, size=count)
    starts = np.cumsum(lengths) - lengths
    tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
    return [np.append(tokens[start : start + length], 256) for start, length in zip(starts, lengths, strict=True)]


def write_corpus(prefix: Path, documents: list[np.ndarray], vocab_size: int | None = BYTE_VOCABULARY) -> None:
    """Write a dataset of `documents`; without a vocabulary it looks like another tool's."""
    meta = Meta(vocab_size, vocab_size - 1) if vocab_size else None
    with IndexWriter(prefix, np.uint16, meta) as writer:
        for document in documents:
            writer.add_document(document)


def write_config(
    folder: Path,
    model: dict[str, Any],
    parallel: dict[str, Any],
    train: dict[str, Any],
    cluster: dict[str, Any] | None = None,
    **others: Any,
) -> Path:
    """A configuration file with one model, `tiny`, whose results go to `folder`."""
    model = {"n_layer": 2, "n_head": 4, "n_embd": 32, "seq_len": 16, "vocab_size": BYTE_VOCABULARY, **model}
    train = {"iterations": 4, "micro_batch_size": 2, "global_batch_size": 8, "lr": 0.01, "warmup": 0.25, **train}
    train = {"split": "90,10,0", "log_interval": 1, "eval_batches": 1, **train}
    tiny = {"model": model, "parallel": parallel, "train": train, **others}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    # one thread: threads that wait for a core make operations on tiny tensors ten times slower
    config = {
        "run": str(folder),
        "urls": ["unused.txt"],
        "models": {"tiny": tiny},
        "cluster": {"cpus_per_task": 1, **(cluster or {})},
    }
    path.write_text(yaml.safe_dump(config))
    return path


def byte_vocabulary(folder: Path, *merges: str) -> VocabularyFiles:
    """The files of a tokenizer of bytes, the results of `merges`, and end-of-text."""
    tokens = [*CHARACTERS, *(merge.replace(" ", "") for merge in merges), END_OF_TEXT]
    files = VocabularyFiles(folder / f"{len(tokens)}.json", folder / f"{len(tokens)}.bpe")
    write_json(files.encoder_json, {token: number for number, token in enumerate(tokens)})
    files.vocab_bpe.write_text("\n".join(["#version: 0.2", *merges, ""]))
    return files


def make_run(folder: Path, *, documents: int = 60, **sections: Any) -> Path:
    """A corpus and a configuration for it; returns the configuration's path."""
    config = write_config(folder, **{"model": {}, "parallel": {}, "train": {}, **sections})
    write_corpus(load_settings(config).dataset_prefix, byte_documents(documents))
    return config


def copy_run(run: Path, folder: Path) -> Path:
    """A copy of a run that may be changed, in `folder`; returns its configuration's path."""
    shutil.copytree(run, folder, dirs_exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"run": str(folder)}))
    return config


def settings_of(config: Path) -> Settings:
    return load_settings(config, model="tiny")


def plan_of(config: Path, *overrides: str) -> Plan:
    """The plan of a configuration's model."""
    return make_plan(load_settings(config, overrides, "tiny"), "tiny")


def course(run: Path) -> list[tuple[str, ...]]:
    """The columns of train.csv that are equal in two equal runs, whatever the machine's speed."""
    keys = ("iteration", "consumed_samples", "learning_rate", "lm_loss", "grad_norm", "skipped", "non_finite")
    return [tuple(row[key] for key in keys) for row in read_rows(run / "train.csv")]


def tensor_files(path: Path) -> dict[str, Any]:
    """A manifest's entries of the files of tensors: equal for equal tensors in one layout."""
    return {name: entry for name, entry in read_json(path / "manifest.json")["files"].items() if "rank" in name}


def save_checkpoint(
    folder: Path, parameters: Any, optimizer: torch.optim.Optimizer, progress: Progress, plan: Plan
) -> Path:
    """A checkpoint in a model folder, as a run writes it (a collective call)."""
    folder.mkdir(parents=True, exist_ok=True)
    run = checkpoint.SavedRun(folder, plan.experiment, plan.tokenize, plan.data.train)
    tensors = checkpoint.state_tensors(parameters, optimizer)
    held = checkpoint.held_shards(tensors, plan.experiment.model.vocab_size)
    return checkpoint.write(run, *held, progress, checkpoint.compare_replicas(parameters))


ALONE = World(0, 1, torch.device("cpu"))


@dataclass
class Session(session.Session):
    """A session with the plan that it was opened for."""

    plan: Plan


def open_session(plan: Plan, world: World = ALONE) -> Session:
    """The model of a plan, built as the trainer builds it (a collective call)."""
    return Session(**vars(session.open_session(plan.experiment, world)), plan=plan)


def make_session(folder: Path, **sections: Any) -> Session:
    """A session of one process with the configuration that `make_run` writes."""
    return open_session(plan_of(make_run(folder, **sections)))


def step_batches(session: Session, consumed: int) -> Generator[list[Batch], None, None]:
    """Micro-batches of the plan's training data."""
    return step.step_batches(session, session.plan.data.train, consumed)


def train_steps(session: Session, count: int, rate: float = 0.01, scale: float = 1.0) -> list[StepResult]:
    """The first steps of a training."""
    with closing(step_batches(session, 0)) as batches:
        return [train_step(session, number, next(batches), rate, scale) for number in range(1, count + 1)]


def checkpoint_writer(session: Session, folder: Path, may_write: Callable[[], None] = lambda: None) -> CheckpointWriter:
    """The writer that saves a session's checkpoints."""
    plan = session.plan
    run = checkpoint.SavedRun(folder, plan.experiment, plan.tokenize, plan.data.train, may_write)
    return CheckpointWriter(run, session.parameters, session.optimizer)


def train_tiny(config: Path, *overrides: str) -> int:
    """`python -m training.train` in this process; returns the exit code."""
    from training.train import main

    return run_main(main, "--config", config, "--model", "tiny", *overrides)


def refusal(capsys: Capsys, main: Callable[[list[str]], int], *arguments: object) -> str:
    """The one line on stderr with which a command exits with 2."""
    capsys.readouterr()
    assert run_main(main, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)


# Processes are forked from one server that has imported torch: an import costs more than most tests
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["training.job", "training.train"])


@dataclass
class Finished:
    """How one process of a job ended: its exit code and output."""

    returncode: int | None
    stdout: str
    stderr: str


def _task(rank: int, size: int, command: str | Main, arguments: tuple[object, ...], output: Path) -> None:
    """In a new process: run a command, or the `main` of its module, as submitit starts a task."""
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(output / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ |= {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": output.name,
        "SUBMITIT_LOCAL_NTASKS": str(size),
        "SUBMITIT_LOCAL_GLOBALID": str(rank),
        "SUBMITIT_LOCAL_LOCALID": str(rank),
    }
    sys.exit(run_main(importlib.import_module(command).main if isinstance(command, str) else command, *arguments))


class Job:
    """A command running as the `size` tasks of one job; the end of `with` kills running tasks."""

    def __init__(self, size: int, command: str | Main, *arguments: object) -> None:
        self._output = Path(tempfile.mkdtemp())
        given = (size, command, arguments, self._output)
        self.tasks = [_PROCESSES.Process(target=_task, args=(rank, *given)) for rank in range(size)]

    def __enter__(self) -> "Job":
        for task in self.tasks:
            task.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.signal(signal.SIGKILL)
        for task in self.tasks:
            task.join()
        shutil.rmtree(self._output)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks, or to all."""
        for task in [self.tasks[rank] for rank in ranks] or self.tasks:
            if task.pid is not None and task.is_alive():
                os.kill(task.pid, number)

    def wait(self, timeout: float = PATIENCE) -> list[Finished]:
        """How each task ended; one that hangs has no return code."""
        deadline = time.monotonic() + timeout
        results = []
        for rank, task in enumerate(self.tasks):
            task.join(max(0.0, deadline - time.monotonic()))
            results.append(Finished(task.exitcode, self.said(rank, "out"), self.said(rank, "err")))
        return results

    def wait_until_said(self, text: str, stream: str = "out", times: int = 1) -> None:
        """Wait until the first task has written a text; fails with its output if it does not."""
        first = self.tasks[0]
        with suppress(AssertionError):
            wait_for(lambda: self.said(0, stream).count(text) >= times or not first.is_alive())
        said = self.said(0, stream)
        assert said.count(text) >= times, f"exit code {first.exitcode}\n{said}\n{self.said(0, 'err')}"

    def said(self, rank: int, stream: str) -> str:
        """What a task has written to `out` or `err` so far."""
        path = self._output / f"{rank}.{stream}"
        return path.read_text() if path.exists() else ""


def launch(size: int, command: str | Main, *arguments: object, timeout: float = PATIENCE) -> list[Finished]:
    """Run a command as the `size` tasks of a job; a job that hangs is killed: no return code."""
    with Job(size, command, *arguments) as job:
        return job.wait(timeout)


def launch_ok(size: int, command: str | Main, *arguments: object, timeout: float = PATIENCE) -> list[Finished]:
    """`launch`, asserting that every process exits with 0."""
    results = launch(size, command, *arguments, timeout=timeout)
    for result in results:
        assert result.returncode == 0, result.stdout + result.stderr
    return results


def on_ranks(size: int, function: Callable[..., Any], *arguments: object, timeout: float = PATIENCE) -> list[Any]:
    """What `function(world, *arguments)` returns on each rank of a job of `size` processes."""
    with tempfile.TemporaryDirectory() as folder:
        launch_ok(size, partial(on_rank, function, arguments, Path(folder)), timeout=timeout)
        return [pickle.loads((Path(folder) / f"{rank}").read_bytes()) for rank in range(size)]


def on_rank(function: Callable[..., Any], arguments: tuple[object, ...], folder: Path, _argv: list[str]) -> int:
    """One process of such a job."""
    with started(read_launch(), folder) as world:
        result = function(world, *arguments)
        (folder / f"{world.rank}").write_bytes(pickle.dumps(result))
    return 0
