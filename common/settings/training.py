"""The sections of training, the jobs that train it, and the sample it gives."""

from itertools import count
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from common.settings.model import ModelSettings, ParallelSettings
from common.settings.section import NonNegativeInt, PositiveFloat, PositiveInt, Section, Seed, Share, Size

Beta = Annotated[float, Field(ge=0, lt=1)]
Float32 = Annotated[float, Field(ge=0, le=3e38)]  # stays finite as a float32
PositiveFloat32 = Annotated[float, Field(gt=0, le=3e38)]
_LARGEST_BATCH = 2**31 - 1
_MICRO_BATCH = 4  # samples, where neither micro_batch_size nor anything else says how many


def split_shares(split: str) -> list[float]:
    """The shares of training, validation and test in "949,50,1". Raises ValueError for anything else."""
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or not all(0 <= share <= 1e15 for share in shares) or not shares[0]:
        raise ValueError(
            f"{split!r} must be three shares for train, valid and test, such as 949,50,1: none below 0 or over 1e15, "
            "and some for train"
        )
    return shares


class TrainSettings(Section):
    """Optimisation."""

    iterations: PositiveInt
    """Optimiser steps."""
    micro_batch_size: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Samples in one forward pass of one data-parallel rank. 0: derived from the other two (default: the largest of 4,
    3, 2 and 1 that fits)."""
    accumulation: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Micro-batches of one data-parallel rank in an optimiser step. 0: derived from the other two (default: 1, or as
    many as the pipeline's schedule needs)."""
    global_batch_size: Annotated[int, Field(ge=0, le=_LARGEST_BATCH)] = 0
    """Samples per optimiser step: micro_batch_size x accumulation x data. 0: that product."""
    lr: PositiveFloat32 = 1.5e-4
    """Peak learning rate."""
    min_lr: Float32 = 1e-5
    """Least learning rate after the warm-up, at most lr."""
    warmup: Share = 0.01
    """Share of the iterations over which the learning rate rises."""
    warmup_iterations: NonNegativeInt = 0
    """Iterations over which the learning rate rises, at most all of them. 0: the share above."""
    lr_decay: Literal["cosine", "linear", "constant", "inverse_sqrt"] = "cosine"
    """How the learning rate falls after the warm-up: to min_lr at decay_iterations, not at all, or as
    lr x sqrt(warm-up / iteration), never below min_lr."""
    decay_iterations: NonNegativeInt = 0
    """Iteration at which cosine and linear reach min_lr; inverse_sqrt is clamped to min_lr after it, too. 0: the last
    one. Set it to the old last iteration to keep the learning rate as it was when a run is extended."""
    weight_decay: Float32 = 0.01
    """AdamW decay of matrices; none on biases and LayerNorm."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's exponential averages, each from 0 to below 1."""
    eps: PositiveFloat32 = 1e-8
    """AdamW's denominator term."""
    clip_grad: PositiveFloat32 = 1.0
    """Largest norm of the global gradient."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Compute activations anew in the backward pass instead of keeping them: selective all but the results of matrix
    products and attention, full everything inside a layer."""
    compile: bool | None = None
    """torch.compile for every layer; leave out for: on GPUs."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the matrix products; parameters, their gradients and moments are always float32. auto: bfloat16 on GPUs that
    have it, else float32."""
    initial_loss_scale: Annotated[float, Field(gt=0, le=2.0**126)] = 2.0**32
    """float16: what the loss is multiplied by at first. It halves at overflows and doubles when there were none."""
    loss_scale_window: PositiveInt = 1000
    """float16: steps without an overflow after which the loss scale doubles."""
    hysteresis: PositiveInt = 2
    """float16: overflows before the loss scale halves."""
    seed: Seed = 1234
    """Seed of the initial weights, dropout and data order, below 2^64."""
    split: str = "949,50,1"
    """Documents for training, validation and test, in proportion."""
    reset_position_ids: bool = False
    """Positions begin at 0 again behind every end-of-text."""
    eod_mask_loss: bool = False
    """No loss where end-of-text is the input: the next document cannot be foreseen."""
    readers: Annotated[int, Field(gt=0, le=1024)] = 2
    """Threads of each process that read batches ahead of their use."""
    log_interval: PositiveInt = 100
    """Iterations between two log lines."""
    eval_interval: PositiveInt = 1000
    """Iterations between two validation runs; one more happens at the end."""
    eval_batches: PositiveInt = 10
    """Global batches in a validation run (the whole split where it is smaller)."""
    save_interval: PositiveInt = 1000
    """Iterations between two checkpoints; one more is written at the end."""
    async_save: bool = False
    """Write checkpoints while training goes on, from a copy in the CPU's memory."""
    keep_last: NonNegativeInt = 0
    """Newest checkpoints to keep, older ones are removed. 0: all."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of every such iteration are kept for good, whatever keep_last says. 0: none."""

    @property
    def warmup_end(self) -> int:
        """Iterations of the warm-up."""
        return self.warmup_iterations or round(self.warmup * self.iterations)

    @property
    def decay_end(self) -> int:
        """Iterations after which the rate is min_lr for good."""
        return self.decay_iterations or self.iterations

    @field_validator("split")
    @classmethod
    def _three_shares(cls, split: str) -> str:
        split_shares(split)
        return split

    @model_validator(mode="after")
    def _rates_fall(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}; give one that is lr at most")
        if self.decay_iterations and self.lr_decay == "constant":
            raise ValueError(f"decay_iterations {self.decay_iterations}, but lr_decay constant has no end; remove one")
        if 0 < self.decay_iterations < self.warmup_end:
            raise ValueError(
                f"decay_iterations {self.decay_iterations} is before the end of the warm-up, "
                f"{self.warmup_end} iterations; raise it, or shorten the warm-up"
            )
        return self


class WatchSettings(Section):
    """What the trainer looks out for while nobody watches."""

    non_finite: Literal["stop", "skip"] = "stop"
    """What to do at a loss or gradient that is NaN or infinite: stop before the weights are touched, or leave out that
    step (ten in a row stop the run, too). float16 skips, and stops when its loss scale has come down to 1."""
    spike: Annotated[float, Field(ge=0)] = 1.0
    """Nats by which a loss must exceed the mean of the 100 before it to be called a spike. 0: no loss is."""
    spike_reaction: Literal["warn", "skip", "stop"] = "warn"
    """What to do at a spike: say so, leave out that step too, or stop before the weights are touched."""
    silence_seconds: Annotated[float, Field(ge=0, le=1e8)] = 600
    """Seconds without progress after which every process writes the stacks of its threads. 0: never."""


class LogSettings(Section):
    """Where a run's figures go besides its log and its CSV files."""

    tensorboard: bool = True
    """Write TensorBoard event files into RUN/tensorboard."""
    wandb: str = ""
    """Weights & Biases project; empty for none. WANDB_MODE=offline keeps everything on this machine."""
    peak_tflops: Annotated[float, Field(ge=0)] = 0
    """Dense peak of one device in TFLOP/s, what MFU is a share of. 0: known from the device's name, where it is."""


class DataSettings(Section):
    """One corpus of a blend."""

    prefix: Path
    """PREFIX of a dataset (PREFIX.bin, PREFIX.idx), from this toolkit or from Megatron-LM."""
    weight: PositiveFloat
    """Its share of the samples, beside the weights of the others; they need not add up to 1."""

    @field_validator("prefix")
    @classmethod
    def _has_a_name(cls, prefix: Path) -> Path:
        if not prefix.name or "\0" in str(prefix):
            raise ValueError(f"{str(prefix)!r} is no PREFIX; give the name of a dataset without .bin or .idx")
        return prefix


class Experiment(Section):
    """One model to train: `train_<name>` and `merge_<name>` are its targets."""

    model: ModelSettings
    """Architecture."""
    data: list[DataSettings] = []
    """What to train it on: a list of {prefix, weight}. Leave out for the run's own corpus."""
    parallel: ParallelSettings = ParallelSettings()
    """Layout."""
    train: TrainSettings
    """Optimisation."""
    finetune: Path | None = None
    """Hugging Face folder of the GPT-2 whose weights training starts from, instead of random ones."""
    watch: WatchSettings = WatchSettings()
    """Reactions to numbers and processes that go wrong."""
    log: LogSettings = LogSettings()
    """Figures of the run."""
    time_limit_minutes: PositiveInt = 24 * 60
    """Wall-clock limit of one job."""

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return self.parallel.world_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of one data-parallel rank in an optimiser step."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.parallel.data)

    @field_validator("data")
    @classmethod
    def _corpora_differ(cls, data: list[DataSettings]) -> list[DataSettings]:
        for number, source in enumerate(data):
            if any(source.prefix == other.prefix for other in data[:number]):
                raise ValueError(f"{source.prefix} is named twice; name it once, with the sum of its weights")
        return data

    @model_validator(mode="after")
    def _layout_fits(self) -> Self:
        model, parallel = self.model, self.parallel
        for name, value in (("n_head", model.n_head), ("seq_len", model.seq_len)):
            if value % parallel.tensor and (name == "n_head" or parallel.sequence_parallel):
                raise ValueError(
                    f"parallel.tensor {parallel.tensor} does not divide model.{name} {value}; choose a divisor"
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
        """Micro x accumulation x data = global: of the three in `train`, what is left out follows from the others.

        Every message names values that are accepted together with the keys it does not name.
        """
        train, parallel, data = self.train, self.parallel, self.parallel.data
        micro, accumulation, whole = train.micro_batch_size, train.accumulation, train.global_batch_size
        if whole:
            named = {"train.micro_batch_size": micro, "train.accumulation": accumulation, "parallel.data": data}
            unit = (micro or 1) * (accumulation or 1) * data
            if whole % unit or (micro and accumulation and whole != unit):
                product = " x ".join(f"{key} {value}" for key, value in named.items() if value)
                nearest = [number for number in (whole // unit * unit, (whole // unit + 1) * unit) if number]
                cures = [unit] if micro and accumulation else nearest
                raise ValueError(
                    f"train.global_batch_size {whole} is not {'' if micro and accumulation else 'a multiple of '}"
                    f"{product} = {unit}; set it to {' or '.join(map(str, cures))}, or leave it out"
                )
            rest = whole // unit  # the missing factors
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
        if micro * accumulation * data > _LARGEST_BATCH:
            raise ValueError(
                f"train.global_batch_size {micro * accumulation * data} is over {_LARGEST_BATCH}; lower it"
            )
        # accumulation stays as it was given: where it was not, it follows a change of `data` in a resolved file
        derived = {"micro_batch_size": micro, "global_batch_size": micro * accumulation * data}
        object.__setattr__(self, "train", train.model_copy(update=derived))  # frozen for everybody else
        return self

    def check_schedule(self, key: str) -> None:
        """ValueError when the warm-up is longer than the run; `key` names this model.

        No validator: manifests of runs that were once allowed to be so stay readable.
        """
        if self.train.warmup_end > self.train.iterations:
            raise ValueError(
                f"{key}.train.warmup_iterations {self.train.warmup_end} is longer than the run, "
                f"{self.train.iterations} iterations; lower it, or raise {key}.train.iterations"
            )


class ClusterSettings(Section):
    """Where training jobs run (`python -m cluster.submit`)."""

    executor: Literal["local", "slurm"] = "local"
    """local: processes on this machine; slurm: sbatch."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs of a node, one process each; 0 trains on CPUs."""
    tasks_per_node: PositiveInt = 8
    """Processes a node takes when it has no GPUs."""
    cpus_per_task: PositiveInt = 1
    """CPU cores of a process."""
    mem_gb_per_task: PositiveInt = 8
    """Memory of a process, in GB (Slurm only)."""
    partition: str = ""
    """Slurm partition; empty for the cluster's default."""
    account: str = ""
    """Slurm account; empty for the user's default."""


class GenerateSettings(Section):
    """The sample that `all` ends with."""

    prompt: str = "The"
    """Text to continue."""
    max_tokens: Size = 64
    """Tokens to add."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """0 is greedy."""
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] = 40
    """Choose among the k likeliest tokens; 0 for all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Choose among the likeliest tokens that make up this probability."""
    seed: Seed = 1
    """Seed of the sampling, below 2^64."""
