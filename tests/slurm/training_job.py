"""A small training on a real Slurm, two nodes x two tasks, for tests that disturb it and look at how it ends."""

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from common.files import read_json, read_rows
from common.tokenizer import Tokenizer
from corpus.index import IndexWriter, Meta, token_dtype
from tests.conftest import ROOT
from tests.helpers import prose
from tests.slurm.lab import Lab

ITERATIONS, SAVE_INTERVAL = 60, 10
MODEL: dict[str, Any] = {
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 32, "dropout": 0.1},
    "parallel": {"tensor": 2, "data": 2},
    "train": {
        "iterations": ITERATIONS, "micro_batch_size": 2, "global_batch_size": 4, "lr": 0.01, "warmup": 0.1,
        "split": "80,20,0", "log_interval": 1, "eval_interval": 1000, "save_interval": SAVE_INTERVAL,
    },
}  # fmt: skip


@dataclass(frozen=True)
class TrainingJob:
    """One training, submitted from `folder`."""

    lab: Lab
    folder: Path
    iterations: int = ITERATIONS

    @property
    def model_folder(self) -> Path:
        return self.folder / "models" / "tiny"

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def id(self) -> str:
        return str(read_json(self.model_folder / "job.json")["id"])

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = read_json(self.model_folder / "state.json")
        return found

    @property
    def log(self) -> str:
        path = self.model_folder / "logs" / f"{self.id}_0_log.out"
        return path.read_text() if path.exists() else ""

    def command(self, verb: str, *options: str) -> list[str]:
        return [sys.executable, "-m", f"cluster.{verb}", *options]

    def submit(self, *options: str) -> None:
        """Submit it, and return as soon as Slurm has accepted it."""
        result = self.lab.run(*self.command("submit", *self.names, *options), cwd=ROOT)
        assert result.returncode == 0, result.stderr

    @property
    def names(self) -> list[str]:
        return ["--config", str(self.config), "--model", "tiny"]

    def wait(self, timeout: float = 240) -> str:
        """Wait for its end with `--wait`, which must succeed; returns what that printed."""
        result = self.lab.run(*self.command("submit", *self.names, "--wait"), cwd=ROOT, timeout=timeout)
        assert result.returncode == 0, f"{result.stdout}{result.stderr}{self.log[-3000:]}"
        return result.stdout

    def iteration(self) -> int:
        """The last iteration in its log."""
        path = self.model_folder / "train.csv"
        rows = read_rows(path) if path.exists() else []
        return int(rows[-1]["iteration"]) if rows else 0

    def until(self, condition: Callable[[], object], timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"{self.log[-3000:]}\n{self.lab.run('squeue', '-a').stdout}"
            time.sleep(0.2)

    def until_saved(self) -> None:
        """Wait until a checkpoint exists and training has gone on since."""
        self.until(lambda: self.iteration() >= SAVE_INTERVAL + 3)

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of its ranks on this machine, by rank."""
        found = {}
        for process in psutil.process_iter():
            try:
                if "training.train" in process.cmdline() and any(
                    str(self.folder) in word for word in process.cmdline()
                ):
                    found[int(process.environ()["SLURM_PROCID"])] = process
            except (psutil.Error, KeyError):
                continue
        return found

    def digest(self) -> str:
        """A hash of the tensors of the last checkpoint."""
        digest = hashlib.sha256()
        for path in sorted((self.model_folder / f"iter_{self.iterations:07d}").glob("*.distcp")):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def restarts(self) -> int:
        """How often Slurm has started it again."""
        return int(self.lab.job(self.id)["Restarts"])


def alive(process: psutil.Process) -> bool:
    """Whether a process runs; a step whose slurmd is dead leaves zombies."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def lay_out(
    lab: Lab, folder: Path, *, minutes: int = 60, iterations: int = ITERATIONS, **cluster: object
) -> TrainingJob:
    """A configuration with a dataset of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer()
    with IndexWriter(folder / "dataset" / "corpus_text_document", token_dtype(50257), Meta(50257, 50256)) as index:
        for number in range(20):
            index.add_document([*tokenizer.encode(prose(number)).tolist(), 50256])
    job = TrainingJob(lab, folder, iterations)
    settings = {"executor": "slurm", "tasks_per_node": 2, "cpus_per_task": 1, "mem_gb_per_task": 1, **cluster}
    train = {**MODEL["train"], "iterations": iterations}
    models = {"tiny": {**MODEL, "train": train, "time_limit_minutes": minutes}}
    config = {"run": str(folder), "urls": ["none"], "models": models, "cluster": settings}
    job.config.write_text(yaml.safe_dump(config))
    return job
