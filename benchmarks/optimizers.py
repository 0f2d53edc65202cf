"""Muon against AdamW on real text, on CPUs: how many tokens each needs for the same validation loss.

    python -m benchmarks.optimizers --output-dir results/optimizers

Text is what Debian's documentation packages bring (apt-get download), and becomes tokens by this toolkit's DAG. Three
models train with both optimisers, one CPU each, several at a time. Each has its learning rates tuned, with one seed, in
factors of 2, until the best one has neighbours that are worse. A seed gives both optimisers the same initial weights
and batches.

The rate is constant after the warm-up and falls to 0 over the last fifth (`wsd`), so that the shorter trainings, which
tell when Muon has AdamW's loss, begin from checkpoints of the long one. Hours on two cores; a command that was
interrupted continues when it is repeated. The table's first columns are final validation losses.
"""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from benchmarks.harness import Row, machine, table
from common import cli
from common.errors import JobError
from common.files import read_json, read_rows, write_json
from common.workers import available_cpus

PACKAGES = (
    "linux-doc-6.1 perl-doc git-doc python3.11-doc llvm-15-doc clang-15-doc cmake-doc vim-runtime ghc-doc sagemath-doc "
    "python-sklearn-doc python-pandas-doc python-sqlalchemy-doc python-statsmodels-doc python-astropy-doc "
    "python-sympy-doc nova-doc neutron-doc debian-policy emacs-common"
).split()
"""Of Debian 12: 110 MB in .txt and .pod files."""
VOCABULARY = 2048
MODELS: Mapping[str, Mapping[str, int]] = {
    "small": {"n_layer": 4, "n_head": 2, "n_embd": 64},
    "medium": {"n_layer": 4, "n_head": 2, "n_embd": 128},
    "large": {"n_layer": 6, "n_head": 4, "n_embd": 192},  # 0.35, 1.1 and 3.1 million parameters
}
ITERATIONS = 2400  # x 4 samples of 256 tokens = 2.5 million tokens; a larger batch costs AdamW more than Muon
SHORTER = (0.3, 0.45, 0.6, 0.75)  # of Muon's trainings, as shares of the iterations
COOLDOWN = 0.2  # of each training
OPTIMIZERS = ("adamw", "muon")
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
SEEDS = (1, 2, 3)
TRAIN = {
    "iterations": ITERATIONS,
    "micro_batch_size": 4,
    "global_batch_size": 4,
    "warmup_iterations": 240,
    "lr_decay": "wsd",
    "min_lr": 0.0,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "split": "99,1,0",
    "compile": "blocks",
    "log_interval": 40,
    "eval_interval": ITERATIONS,
    "eval_batches": 160,
    "save_interval": 288,  # where the shorter trainings begin
}


class Training(NamedTuple):
    """One training: its settings, and the name of its model folder."""

    size: str
    optimizer: str
    rate: float
    seed: int
    share: float = 1.0

    @property
    def name(self) -> str:
        """Name of the model."""
        return "_".join(map(str, self)).replace(".", "-")


class Study:
    """The trainings below a folder."""

    def __init__(self, folder: Path) -> None:
        self.run, self.config = folder / "run", folder / "config.yaml"

    def train(self, trainings: Iterable[Training]) -> None:
        """Train those that are not finished, as many at a time as there are CPUs. Raises JobError if one fails."""
        with ThreadPoolExecutor(available_cpus()) as pool:
            list(pool.map(self._train, trainings))

    def _train(self, training: Training) -> None:
        folder = self.run / "models" / training.name
        if (folder / "done.json").exists():
            return
        end = round(training.share * ITERATIONS)
        cooldown = round(COOLDOWN * end)
        if training.share < 1:
            first = f"iter_{end - cooldown:07}"
            trunk = self.run / "models" / training._replace(share=1.0).name
            shutil.copytree(trunk / first, folder / first, dirs_exist_ok=True)
        changed = {
            "optimizer": training.optimizer,
            "lr": training.rate,
            "seed": training.seed,
            "iterations": end,
            "cooldown_iterations": cooldown,
        }
        words = ["--quiet", f"--config={self.config}", f"--model={training.size}"]
        words += [f"--name={training.name}", *(f"train.{key}={value}" for key, value in changed.items())]
        _call([sys.executable, "-m", "training.train", *words], self.run / "logs" / f"{training.name}.log")

    def loss(self, training: Training) -> float:
        """Final validation loss; infinite where a training diverged."""
        value: float = read_json(self.run / "models" / training.name / "done.json")["valid_loss"]
        return value if math.isfinite(value) else math.inf

    def milliseconds(self, training: Training) -> float:
        """Of a step."""
        rows = read_rows(self.run / "models" / training.name / "train.csv")
        return median(float(row["ms_per_iteration"]) for row in rows)

    def best(self, trainings: Iterable[Training]) -> Training:
        """The training with the lowest loss."""
        return min(trainings, key=self.loss)


def _call(command: Sequence[str | Path], log: Path, folder: Path | None = None) -> None:
    """Run a command, its output in `log`. Raises JobError if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as file:
        if code := subprocess.run(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, check=False).returncode:
            raise JobError(f"{' '.join(map(str, command[:3]))} ended with exit code {code}: see {log}")


def prepare(folder: Path) -> Study:
    """Download the packages, and make the corpus."""
    study, packages, texts = Study(folder), folder / "packages", folder / "texts"
    packages.mkdir(parents=True, exist_ok=True)
    if not texts.exists():
        _call(["apt-get", "download", *PACKAGES], folder / "packages.log", packages)
        for package in packages.glob("*.deb"):
            _call(["dpkg-deb", "-x", package, folder / "unpacked"], folder / "packages.log")
        os.rename(folder / "unpacked", texts)
    shape = {"vocab_size": VOCABULARY, "seq_len": 256, "dropout": 0.0}
    settings = {
        "run": str(study.run),
        "shards": 2,  # they decide the order of the documents
        "train_models": [],
        "sources": [{"path": str(texts), "glob": ["**/*.txt", "**/*.pod"], "format": "text"}],
        "dedup": {"jobs": 1},
        "train_tokenizer": {"vocab_size": VOCABULARY},
        "cluster": {"cpus_per_task": 1},
        "models": {size: {"model": {**model, **shape}, "train": TRAIN} for size, model in MODELS.items()},
    }
    write_json(study.config, settings)
    _call([sys.executable, "-m", "snakemake", "--quiet", "--configfile", study.config], folder / "corpus.log")
    return study


def tune(study: Study, size: str, rates: Mapping[str, Iterable[float]]) -> dict[str, list[Training]]:
    """Trainings of a model by optimiser: at least those with `rates`, and with the neighbours of the best one."""
    tried = {name: {*values} for name, values in rates.items()}
    while True:
        trainings = {
            name: [Training(size, name, rate, SEEDS[0]) for rate in sorted(values)] for name, values in tried.items()
        }
        study.train(chain(*trainings.values()))
        best = {name: study.best(each).rate for name, each in trainings.items()}
        wanted = {name: {rate / 2, rate * 2} | tried[name] for name, rate in best.items()}
        if wanted == tried:
            return trainings
        tried = wanted


def tokens_needed(study: Study, training: Training, loss: float) -> float:
    """Share of the tokens after which Muon has a loss; between two trainings linear in the logarithm of the tokens.

    As far as the shortest training where that is enough; infinite where the longest is not.
    """
    points = [(share, study.loss(training._replace(share=share))) for share in (*SHORTER, 1.0)]
    reached = next((index for index, (_, found) in enumerate(points) if found <= loss), None)
    if reached is None:
        return math.inf
    (share, found), (before, other) = points[reached], points[max(0, reached - 1)]
    return share if not reached else before * (share / before) ** ((other - loss) / (other - found))


def measure(study: Study) -> Iterable[list[Row]]:
    """Two tables for each model: learning rates, and what Muon saves."""
    rates: Mapping[str, Iterable[float]] = dict.fromkeys(OPTIMIZERS, RATES)
    for size in MODELS:
        tuned = tune(study, size, rates)
        losses = {name: {each.rate: study.loss(each) for each in trainings} for name, trainings in tuned.items()}
        yield [
            {"model": size, "learning rate": rate, **{name: found.get(rate) for name, found in losses.items()}}
            for rate in sorted({*chain(*losses.values())})
        ]
        best = [study.best(trainings) for trainings in tuned.values()]
        yield [_result(study, _seeds(study, best))]
        rates = {training.optimizer: (training.rate / 2, training.rate) for training in best}


def _seeds(study: Study, trainings: Iterable[Training]) -> list[Training]:
    """Train with all seeds, and Muon also shorter."""
    whole = [training._replace(seed=seed) for training in trainings for seed in SEEDS]
    study.train(whole)
    study.train(each._replace(share=share) for each in whole if each.optimizer == "muon" for share in SHORTER)
    return whole


def _result(study: Study, trainings: Sequence[Training]) -> Row:
    """The row of a model."""
    adamw, muon = ([each for each in trainings if each.optimizer == name] for name in OPTIMIZERS)
    losses = {"adamw": [*map(study.loss, adamw)], "muon": [*map(study.loss, muon)]}
    shares = [tokens_needed(study, each, loss) for each, loss in zip(muon, losses["adamw"], strict=True)]
    slower = mean(map(study.milliseconds, muon)) / mean(map(study.milliseconds, adamw))
    return {
        "model": trainings[0].size,
        **{name: mean(found) for name, found in losses.items()},
        **{f"{name}, seeds": (min(found), max(found)) for name, found in losses.items()},
        "muon's tokens for adamw's loss": mean(shares),
        "seeds": (min(shares), max(shares)),
        "muon's time for a step": slower,
        "for adamw's loss": slower * mean(shares),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("benchmarks.optimizers", __doc__)
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="for the text and the trainings")
    for rows in measure(prepare(parser.parse_args(argv).output_dir)):
        print(f"{table(rows)}\n", flush=True)
    print(machine())
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
