"""A layout: everything about a step that the planner may choose, and nothing that changes what is learnt."""

from typing import Any, NamedTuple, Self

from common.settings import Experiment, ParallelSettings


class Layout(NamedTuple):
    """How the samples of one optimiser step are spread over GPUs and time; names as in the configuration."""

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
        """The layout of an experiment."""
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
    def stages(self) -> int:
        """Pipeline stages of the model."""
        return self.pipeline * self.virtual_stages

    def keys(self) -> dict[str, dict[str, Any]]:
        """The configuration keys that give this layout: `parallel` and `train`; defaults are left out."""
        values, defaults = self._asdict(), Layout._field_defaults
        parallel = {key: values[key] for key in ParallelSettings.model_fields if key in values}
        return {
            "parallel": {key: value for key, value in parallel.items() if value != defaults[key]},
            "train": {
                "micro_batch_size": self.micro_batch_size,
                "global_batch_size": self.global_batch_size,
                "recompute": self.recompute,
            },
        }

    def apply(self, experiment: Experiment) -> Experiment:
        """The experiment in this layout."""
        raw, keys = experiment.model_dump(), self.keys()
        train = {**raw["train"], **keys["train"], "accumulation": 0}
        return Experiment.model_validate({**raw, "parallel": keys["parallel"], "train": train})
