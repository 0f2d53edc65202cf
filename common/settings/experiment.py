"""The configuration of one model: architecture, data, layout and training, validated together."""

from itertools import count
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from common.settings.cluster import JobSettings
from common.settings.model import ModelSettings, ParallelSettings
from common.settings.section import CheckedSection, PositiveFloat, PositiveInt, Section
from common.settings.training import LARGEST_BATCH, LogSettings, TrainSettings, WatchSettings

# Keys that decide no weights: how training is run, watched and saved.
_RUNNING: Any = {
    "parallel": True, "watch": True, "log": True, "slurm": True, "time_limit_minutes": True,
    "train": {
        "micro_batch_size", "accumulation", "recompute", "compile", "readers", "attention", "loss", "kernels",
        "deterministic", "log_interval", "eval_interval", "eval_batches", "save_interval", "async_save", "keep_last",
        "keep_every", "keep_best", "sample_interval", "sample_prompt", "profile", "profile_ranks", "allow_slow",
        "allow_tight", "allow_optimizer_change",
    },
}  # fmt: skip
# Keys that make the same training longer or shorter; see `training.model_folder.is_finished`.
LENGTH = ("train.iterations", "train.stop_after_no_improvement")
_MICRO_BATCH = 4  # samples, if neither micro_batch_size nor the other two keys determine it


class DataSettings(Section):
    """One dataset of a blend."""

    prefix: Path
    """PREFIX of a dataset (PREFIX.bin, PREFIX.idx), from this toolkit or from Megatron-LM."""
    weight: PositiveFloat
    """Relative share of the samples; the weights need not add up to 1."""


class Experiment(CheckedSection):
    """One model to train; `train_<name>` and `merge_<name>` are its targets."""

    # The sections in it check no needs themselves: a checkpoint with such a key stays readable.

    model: ModelSettings
    """Architecture."""
    data: list[DataSettings] = []
    """Datasets to train on: a list of {prefix, weight}. Left out: the corpus of the run."""
    parallel: ParallelSettings = ParallelSettings()
    """Parallel layout."""
    train: TrainSettings
    """Batch sizes, optimisation and intervals."""
    finetune: Path | None = None
    """Hugging Face folder of a GPT-2 to start from, instead of random weights."""
    watch: WatchSettings = WatchSettings()
    """Reactions to non-finite numbers, spikes and hangs."""
    log: LogSettings = LogSettings()
    """Where metrics go."""
    slurm: JobSettings = JobSettings()
    """What this model's Slurm jobs ask for instead of what `cluster` says."""
    time_limit_minutes: PositiveInt = 24 * 60
    """Wall-clock limit of a job, in minutes. At the limit, a job saves, is requeued and goes on."""

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings that decide the weights: architecture, data, optimisation, no layout."""
        return self.model_dump(mode="json", exclude=_RUNNING, warnings=False)  # a manifest may have older values

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return self.parallel.world_size

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimiser step and data-parallel rank; unknown if auto."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.parallel.data)

    @field_validator("parallel", mode="before", json_schema_input_type=ParallelSettings | Literal["auto"])
    @classmethod
    def _auto_is_a_word(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value

    @model_validator(mode="after")
    def _layout_fits(self) -> Self:
        model, parallel = self.model, self.parallel
        for name, value in (("n_head", model.n_head), ("seq_len", model.seq_len)):
            if value % parallel.tensor and (name == "n_head" or parallel.sequence_parallel):
                raise ValueError(
                    f"parallel.tensor {parallel.tensor} does not divide model.{name} {value}; choose a divisor"
                )
        if self.train.compile == "model" and parallel.data > 1:
            raise ValueError(
                "train.compile model, but parallel.data is above 1 and gathers parameters layer by layer; use blocks"
            )
        stages = parallel.pipeline * parallel.virtual_stages
        if stages > model.n_layer:
            raise ValueError(
                f"parallel.pipeline {parallel.pipeline} x parallel.virtual_stages {parallel.virtual_stages} = {stages} "
                f"stages, but model.n_layer is {model.n_layer}"
            )
        return self

    @model_validator(mode="after")
    def _batch_fits(self) -> Self:
        """Compute omitted batch sizes: micro x accumulation x data = global."""
        train, parallel, data = self.train, self.parallel, self.parallel.data
        if parallel.auto:
            return self._auto_fits()
        micro, accumulation, whole = train.micro_batch_size, train.accumulation, train.global_batch_size
        if whole:
            unit = (micro or 1) * (accumulation or 1) * data
            fixed = micro and accumulation
            if whole % unit or (fixed and whole != unit):
                nearest = [number for number in (whole // unit * unit, (whole // unit + 1) * unit) if number]
                cures = " or ".join(map(str, [unit] if fixed else nearest))
                raise ValueError(
                    f"train.global_batch_size {whole} is not {'' if fixed else 'a multiple of '}"
                    f"micro_batch_size x accumulation x data = {unit}; set it to {cures}, or leave it out"
                )
            rest = whole // unit  # product of the missing factors
            if not micro:
                sizes = [size for size in range(_MICRO_BATCH, 0, -1) if not rest % size]
                micro = rest if accumulation else next((n for n in sizes if parallel.takes(rest // n)), sizes[-1])
        micro = micro or _MICRO_BATCH
        if not accumulation:
            needed = next(number for number in count(1) if parallel.takes(number))
            accumulation = whole // (micro * data) if whole else needed
        if not parallel.takes(accumulation):
            works = next(number for number in count(accumulation) if parallel.takes(number))
            raise ValueError(
                f"parallel.schedule {parallel.schedule} over parallel.pipeline {parallel.pipeline} cannot run a step "
                f"with train.accumulation {accumulation}; set train.accumulation to {works} and "
                f"train.global_batch_size to {micro * works * data}"
            )
        if micro * accumulation * data > LARGEST_BATCH:
            raise ValueError(f"train.global_batch_size {micro * accumulation * data} is over {LARGEST_BATCH}; lower it")
        # accumulation stays as given: left out, it can follow a change of `data` in a resolved file
        derived = {"micro_batch_size": micro, "global_batch_size": micro * accumulation * data}
        object.__setattr__(self, "train", train.model_copy(update=derived))  # the model is frozen
        return self

    def _auto_fits(self) -> Self:
        """Check what the planner needs."""
        train = self.train
        if not train.global_batch_size:
            raise ValueError("parallel is auto, but train.global_batch_size is missing; set it to the samples per step")
        if train.accumulation:
            raise ValueError(f"parallel is auto and chooses train.accumulation {train.accumulation}, too; leave it out")
        return self
