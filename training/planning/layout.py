"""The planner's data: a workload, its layouts, a request, and the terms of a prediction."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from common.errors import ConfigError
from common.settings import Experiment, ModelSettings, ParallelSettings
from training.planning.machines import Machine


@dataclass(frozen=True)
class Workload:
    """A model and the settings of its steps that change memory or time."""

    model: ModelSettings
    """With its true vocabulary."""
    precision: str
    """Of products and activations: float32, bfloat16 or float16."""
    compiled: bool
    """Layers, embedding and loss are compiled."""
    loss: str = "auto"
    """train.loss."""
    optimizer: str = "adamw"
    """train.optimizer."""
    attention: float = 1.0
    """Tokens that a token attends to, as a share of those in a whole sample."""

    @classmethod
    def of(cls, experiment: Experiment, machine: Machine, attention: float = 1.0) -> Self:
        """The workload of an experiment on a machine: `auto` depends on it."""
        train = experiment.train
        precision = machine.precision if train.precision == "auto" else train.precision
        compiled = machine.device == "cuda" if train.compile == "auto" else train.compile != "none"
        return cls(experiment.model, precision, compiled, train.loss, train.optimizer, attention)

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "float32" else 2


@dataclass(frozen=True)
class PlanRequest:
    """The given part of a plan; the search covers the rest."""

    gpus: int
    global_batch_size: int
    """Samples per step."""
    micro_batch_size: int = 0
    """0: any."""


class Layout(NamedTuple):
    """How the samples of one optimiser step are spread over GPUs and time.

    Has every key that the planner may choose, and none that changes what is learnt.
    """

    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    data: int = 1
    zero_stage: int = 0
    offload: bool = False
    micro_batch_size: int = 1
    accumulation: int = 1
    recompute: str = "none"

    @classmethod
    def of(cls, experiment: Experiment) -> Self:
        """The layout of an experiment. Raises ConfigError for `parallel: auto`."""
        if experiment.parallel.auto:
            raise ConfigError("parallel is `auto`, so no layout is given; leave --given out to see which there are")
        train = experiment.train
        batch: dict[str, Any] = {"micro_batch_size": train.micro_batch_size, "accumulation": experiment.accumulation}
        return cls(**experiment.parallel.model_dump(exclude={"auto", "gpus"}), **batch, recompute=train.recompute)

    @property
    def world_size(self) -> int:
        """GPUs."""
        return self.pipeline * self.data * self.tensor

    @property
    def global_batch_size(self) -> int:
        """Samples per step."""
        return self.micro_batch_size * self.accumulation * self.data

    @property
    def parallel(self) -> ParallelSettings:
        """The configuration's section `parallel`."""
        values = self._asdict()
        return ParallelSettings(**{key: values[key] for key in values if key in ParallelSettings.model_fields})

    def keys(self) -> dict[str, dict[str, Any]]:
        """The keys `parallel` and `train`; with defaults, so that they replace another layout."""
        batch = ("micro_batch_size", "global_batch_size", "accumulation", "recompute")
        return {"parallel": self.parallel.model_dump(mode="json"), "train": {key: getattr(self, key) for key in batch}}

    def apply(self, experiment: Experiment) -> Experiment:
        """The experiment in this layout."""
        raw, keys = experiment.model_dump(), self.keys()
        train = {**raw["train"], **keys["train"], "accumulation": 0}
        return Experiment.model_validate({**raw, "parallel": keys["parallel"], "train": train})

    def __str__(self) -> str:
        """`tp 8, pp 4 x 2, dp 8, ZeRO 1, batch 1 x 64, full recompute`; what is off is left out."""
        virtual = f" x {self.virtual_stages}" * (self.virtual_stages > 1)
        parts = [
            f"tp {self.tensor}" * (self.tensor > 1),
            f"pp {self.pipeline}{virtual}" * (self.pipeline > 1),
            f"dp {self.data}" * (self.data > 1),
            f"ZeRO {self.zero_stage}" * (self.zero_stage > 0),
            "offload" * self.offload,
            f"batch {self.micro_batch_size} x {self.accumulation}",
            f"{self.recompute} recompute" * (self.recompute != "none"),
        ]
        return ", ".join(filter(None, parts))


class Term(NamedTuple):
    """One summand of a prediction."""

    part: str
    """The part of the memory or of the time that it belongs to."""
    value: float
    """Bytes, or seconds."""
    name: str
    """What it is, in a few words; docs/planning_model.md has its formula."""


def total(terms: Iterable[Term]) -> float:
    """The sum of the terms, in bytes or seconds."""
    return sum(term.value for term in terms)


def by_part(terms: Iterable[Term]) -> dict[str, float]:
    """The sum of each part, in the order of first appearance."""
    parts: dict[str, float] = {}
    for term in terms:
        parts[term.part] = parts.get(term.part, 0.0) + term.value
    return parts
