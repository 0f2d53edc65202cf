"""What is trained, as the planner sees it."""

from dataclasses import dataclass
from typing import Self

from common.settings import Experiment, ModelSettings
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
    async_save: bool = False

    @classmethod
    def of(cls, experiment: Experiment, machine: Machine) -> Self:
        """The workload of an experiment on a machine: `auto` depends on it."""
        train = experiment.train
        precision = machine.precision if train.precision == "auto" else train.precision
        compiled = machine.device == "cuda" if train.compile == "auto" else train.compile != "none"
        return cls(experiment.model, precision, compiled, train.loss, train.async_save)

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "float32" else 2
