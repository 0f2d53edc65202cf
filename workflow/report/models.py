"""Figures about each model of a run, from its folder and those of evaluations and samples."""

import math
import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common import steps
from common.config import load_settings
from common.errors import ToolkitError
from common.files import read_cells, read_json, read_rows, read_text
from common.settings import Experiment, Settings

Floats = NDArray[np.float64]
_GAP = 0.3  # nats: the perplexity of new text is a third higher than that of the training text
_SAMPLE = re.compile(r"^--- (sample \d+, seed \d+)\n", re.MULTILINE)
_SOURCES = re.compile(r"^--- sources: ", re.MULTILINE)


@dataclass(frozen=True)
class Curve:
    """The columns of a CSV file that a training writes."""

    columns: dict[str, Floats]

    def values(self, name: str) -> Floats:
        """A column; empty if the file has none of this name. An empty cell is NaN."""
        return self.columns.get(name, np.empty(0))

    def last(self, name: str) -> float | None:
        """The last value of a column; None if there is none."""
        column = self.values(name)
        return float(column[-1]) if len(column) else None

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)


def read_curve(path: Path) -> Curve:
    """The numbers of a CSV file, by column; none if it does not exist."""
    rows = read_cells(path)
    names = next(rows, [])
    columns = [array("d") for _ in names]  # a list of cells would be a hundred bytes for each number
    for cells in rows:
        for column, cell in zip(columns, cells, strict=True):
            column.append(float(cell) if cell else math.nan)
    return Curve({name: np.array(column) for name, column in zip(names, columns, strict=True) if column})


@dataclass(frozen=True)
class Model:
    """A trained model. A part is None if the step that writes it has not run."""

    name: str
    train: Curve
    valid: Curve
    starts: list[dict[str, str]]
    """Rows of starts.csv: `iteration`, `time` (Unix), `processes` of each start of the training."""
    experiment: Experiment | None
    """Its settings; None if they are of another version."""
    plan: dict[str, Any] | None
    """plan.json: what the training predicted when it started."""
    card: dict[str, Any] | None
    """run.json: where it ran last."""
    test: dict[str, Any] | None
    """The loss of the test part, by the trainer."""
    evaluation: dict[str, Any] | None
    merged: dict[str, Any] | None
    """merge_report.json: the origin of the weights, and the proof that the logits are equal."""
    files: dict[str, dict[str, Any]]
    """The files of the merged folder: `size` in bytes and `xxh3`."""
    sample: str | None

    @property
    def parameters(self) -> int | None:
        """Parameters with a tied head and the padding of no layout."""
        return self.experiment.model.parameters if self.experiment else None

    @property
    def tokens(self) -> int | None:
        """Tokens seen in training."""
        seen = self.train.last("consumed_tokens")
        return None if seen is None else int(seen)

    @property
    def epochs(self) -> float | None:
        """Passes over the training data; for a blend, over the corpus that repeats first."""
        seen, size = self.train.last("consumed_samples"), (self.plan or {}).get("samples_per_epoch")
        return seen / size if seen is not None and size else None

    @property
    def valid_loss(self) -> float | None:
        """The last validation loss of the training, as `cluster.status` shows it."""
        return self.valid.last("loss")

    @property
    def train_loss(self) -> float | None:
        """The mean training loss of the last log interval."""
        return self.train.last("lm_loss")

    @property
    def overfitting(self) -> str:
        """A sentence if the validation loss ended far above the training loss; empty otherwise."""
        gap = (self.valid_loss or math.nan) - (self.train_loss or math.nan)
        epochs = f" after {self.epochs:.1f} epochs" if self.epochs else ""
        text = f"{self.name}: the validation loss is {gap:.2f} nats above the training loss{epochs}:"
        return (
            f"{text} the model memorizes its training text. More text, fewer iterations or dropout help."
            if gap > _GAP
            else ""
        )

    @property
    def hardware(self) -> str:
        """`2 x NVIDIA H100 on node7`; empty if it is not known."""
        card = self.card or {}
        return f"{card['processes']} x {card['device']} on {card['host']}" if "device" in card else ""

    @property
    def seconds(self) -> float | None:
        """Seconds of all iterations, without validation, saving and starting."""
        return self.seconds_between(0, math.inf) if len(self.train.values("ms_per_iteration")) else None

    def seconds_between(self, first: float, last: float) -> float:
        """Seconds of the iterations after `first` up to `last`; see `seconds`."""
        each, ends = self.train.values("ms_per_iteration"), self.train.values("iteration")
        begins = np.append(0.0, ends)[: len(ends)]
        counts = np.minimum(ends, last) - np.maximum(begins, first)
        return float(np.nansum(each * np.maximum(counts, 0))) / 1000 if len(each) else 0.0


def trained_models(run: Path) -> list[Model]:
    """The models that have a training curve, by name."""
    return [_model(run, path.parent) for path in sorted(run.glob("models/*/train.csv"))]


def _model(run: Path, folder: Path) -> Model:
    name, settings = folder.name, settings_of(folder / "settings.yaml")
    merged = steps.result("merge", run, name).parent
    report, listed = _json(merged / "merge_report.json"), _json(merged / "training.json")
    sample, evaluation = steps.result("generate", run, name), _json(steps.result("evaluate", run, name))
    return Model(
        name=name,
        train=read_curve(folder / "train.csv"),
        valid=read_curve(folder / "valid.csv"),
        starts=read_rows(folder / "starts.csv"),
        experiment=settings.models.get(name) if settings else None,
        plan=_json(folder / "plan.json"),
        card=_json(folder / "run.json"),
        test=_json(folder / "test.json"),
        evaluation=evaluation if evaluation and "loss" in evaluation else None,  # no targets, no loss
        merged=report,
        files={**(report or {}).get("output", {}), **(listed or {}).get("files", {})},
        sample=read_text(sample) if sample.exists() else None,
    )


def _json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    content: dict[str, Any] = read_json(path, "delete it to report without it; snakemake makes results again")
    return content


def settings_of(path: Path) -> Settings | None:
    """The settings in a file; None if another version of the toolkit wrote them."""
    try:
        return load_settings(path)
    except (ToolkitError, OSError):
        return None


class Sample(NamedTuple):
    """A text in a file of `training.generate`."""

    heading: str
    """Empty if it is the only text."""
    prompt: str
    """Empty if the text does not begin with the configured one."""
    text: str
    sources: list[str]
    """The share of 8-grams in the training data, then a line per span; empty if not asked for."""


def split_samples(text: str, settings: Settings | None) -> list[Sample]:
    """The texts in a file of `training.generate`."""
    prompt = settings.generate.prompt if settings else ""
    parts = _SAMPLE.split(text)
    samples = []
    for heading, whole in zip(parts[1::2], parts[2::2], strict=True) if len(parts) > 1 else [("", text)]:
        sample, *sources = _SOURCES.split(whole)
        begin = prompt if prompt and sample.startswith(prompt) else ""
        samples.append(Sample(heading, begin, sample[len(begin) :].rstrip(), "".join(sources).splitlines()))
    return samples
