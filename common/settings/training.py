"""The configuration sections of training and of text generation."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from common.settings.section import (
    CheckedSection,
    Name,
    Need,
    NonNegativeInt,
    PositiveInt,
    Section,
    Seed,
    Share,
    Size,
)

Beta = Annotated[float, Field(ge=0, lt=1)]
Float32 = Annotated[float, Field(ge=0, le=3e38)]  # stays finite as a float32
PositiveFloat32 = Annotated[float, Field(gt=0, le=3e38)]
LARGEST_BATCH = 2**31 - 1
DOCUMENT_RULES = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Keys of `train` that separate a sample's documents; losses compare only under equal ones."""

_MUON = Need("train.optimizer muon", lambda train: train.optimizer == "muon", refused=True)
_WSD = Need("train.lr_decay wsd", lambda train: train.lr_decay == "wsd", refused=True)
_FLOAT16 = Need("train.precision float16", lambda train: train.precision == "float16")
_DECAY = Need("a train.lr_decay other than constant", lambda train: train.lr_decay != "constant")
_TASKS = Need("tasks", lambda evaluate: evaluate.tasks, refused=True)


def split_shares(split: str) -> list[float]:
    """The shares of train, valid and test in "949,50,1". Raises ValueError for anything else."""
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
    """Batch sizes, optimisation, and the intervals of logging, validation and saving."""

    iterations: PositiveInt
    """Number of optimiser steps."""
    micro_batch_size: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Samples per forward pass and data-parallel rank. 0: from the other two (4, 3, 2 or 1)."""
    accumulation: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Micro-batches per optimiser step and data-parallel rank. 0: from the other two (default: as
    few as possible)."""
    global_batch_size: Annotated[int, Field(ge=0, le=LARGEST_BATCH)] = 0
    """Samples per optimiser step: micro_batch_size x accumulation x data. 0: that product."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimiser of the matrices of the layers: AdamW, or Muon (Jordan et al. 2024), with updates
    scaled so that AdamW's learning rates and weight decays carry over. AdamW updates everything
    else."""
    lr: PositiveFloat32 = 1.5e-4
    """Peak learning rate."""
    adamw_lr: Annotated[Float32, _MUON] = 0
    """muon: peak learning rate of what AdamW updates: embeddings, LayerNorms, biases. Its schedule
    is that of lr, in proportion. 0: lr."""
    muon_momentum: Annotated[Beta, _MUON] = 0.95
    """muon: decay rate of the momentum, which is Nesterov's."""
    allow_optimizer_change: bool = False
    """Continue a checkpoint of AdamW with Muon, whose momentum starts with AdamW's first moment;
    otherwise refused."""
    min_lr: Annotated[Float32, _DECAY] = 1e-5
    """Minimum learning rate after the warm-up, at most lr."""
    warmup: Annotated[Share, Need("train.warmup_iterations 0", lambda train: not train.warmup_iterations)] = 0.01
    """Share of the iterations over which the learning rate rises linearly."""
    warmup_iterations: NonNegativeInt = 0
    """Iterations of the warm-up, at most all of them. 0: the share in warmup."""
    lr_decay: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = "cosine"
    """Schedule after the warm-up: cosine and linear fall to min_lr at decay_iterations, constant
    stays at lr, inverse_sqrt is lr x sqrt(warm-up / iteration), never below min_lr, and wsd stays
    at lr until the cooldown."""
    cooldown_iterations: Annotated[
        NonNegativeInt,
        _WSD,
        Need(
            "as many iterations between the warm-up and the last one of the schedule",
            lambda train: train.cooldown_iterations <= train.decay_end - train.warmup_end,
            refused=True,
        ),
    ] = 0
    """wsd: iterations of the fall to min_lr, up to decay_iterations. 0: a tenth of these."""
    cooldown: Annotated[Literal["linear", "cosine", "sqrt"], _WSD] = "linear"
    """wsd: shape of the cooldown; sqrt is 1 - sqrt(share of the cooldown)."""
    cycle_iterations: Annotated[
        NonNegativeInt, Need("train.lr_decay cosine", lambda train: train.lr_decay == "cosine", refused=True)
    ] = 0
    """cosine: iterations after which the rate jumps to lr and falls again. 0: a single cosine."""
    decay_iterations: Annotated[NonNegativeInt, replace(_DECAY, refused=True)] = 0
    """Iteration at which cosine, linear and wsd reach min_lr; all but constant stay there after it.
    0: the last iteration. To extend training without changing the schedule, set it to the old last
    iteration."""
    weight_decay: Float32 = 0.01
    """Decoupled weight decay of the parameters that no_decay does not name."""
    no_decay: Annotated[list[str], Need("train.weight_decay above 0", lambda train: train.weight_decay)] = [
        "*.bias",
        "*ln_*",
    ]
    """Patterns of the names of parameters without weight decay (`wte.weight`,
    `h.0.attn.c_attn.bias`, `ln_f.weight`): biases and LayerNorm by default."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay rates of the moment estimates, each from 0 to below 1."""
    eps: PositiveFloat32 = 1e-8
    """AdamW's epsilon, added to the denominator."""
    clip_grad: PositiveFloat32 = 1.0
    """Maximum norm of the whole gradient; larger gradients are scaled down to it."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass instead of keeping them: selective recomputes all
    but the results of matrix products and attention, full everything inside a layer."""
    compile: Literal["auto", "none", "blocks", "model"] = "auto"
    """What torch.compile makes one graph of: nothing, each layer and the embedding and the loss
    (blocks), or everything (model; without data-parallel ranks only). auto: blocks on GPUs, none on
    CPUs."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of matrix products and activations; parameters, moments and the sums of softmax,
    LayerNorm and loss are always float32. auto: bfloat16 on GPUs that support it, else float32.
    float32 on GPUs is IEEE's, never TF32."""
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """PyTorch's attention kernel on GPUs. auto: the fastest, measured when the run begins."""
    loss: Literal["auto", "whole", "chunked"] = "auto"
    """Logits of a micro-batch at once or by eighths. auto: chunked if whole ones take over a
    quarter of the memory."""
    kernels: Literal["auto", "on", "off"] = "auto"
    """CUDA kernels of our own, on GPUs. auto: those that make this run's step faster, measured once
    when a run of an hour or more begins (docs/kernels.md); on: all; off: none."""
    deterministic: bool = False
    """Use only operations that give equal bits in every run on GPUs; slower. On CPUs all do."""
    initial_loss_scale: Annotated[float, Field(gt=0, le=2.0**126), _FLOAT16] = 2.0**32
    """float16: initial loss scale. It halves after overflows, doubles after windows without any."""
    loss_scale_window: Annotated[PositiveInt, _FLOAT16] = 1000
    """float16: consecutive steps without an overflow before the loss scale doubles."""
    hysteresis: Annotated[PositiveInt, _FLOAT16] = 2
    """float16: overflows before the loss scale halves."""
    seed: Seed = 1234
    """Seed of the initial weights, dropout and data order, below 2^64."""
    split: str = "949,50,1"
    """Proportions of the documents for training, validation and test."""
    reset_position_ids: bool = False
    """Restart positions at 0 after every end-of-text."""
    reset_attention_mask: bool = False
    """Let tokens attend only within their document. GPUs use FlashAttention in 16 bits without
    dropout, and PyTorch's attention with a mask otherwise, which is slower."""
    eod_mask_loss: bool = False
    """Mask the loss where the input is end-of-text, because the next document is unpredictable."""
    readers: Annotated[int, Field(gt=0, le=1024)] = 2
    """Threads per process that read batches ahead."""
    log_interval: PositiveInt = 100
    """Iterations between two log lines, each a row of train.csv; a tenth of train.iterations if
    that is fewer. The first and the last iteration have one, too."""
    eval_interval: Annotated[
        PositiveInt, Need("a validation share in train.split", lambda train: split_shares(train.split)[1])
    ] = 1000
    """Iterations between two validation runs; one more happens at the end."""
    eval_batches: PositiveInt = 10
    """Global batches per validation run (the whole split if it is smaller)."""
    stop_after_no_improvement: NonNegativeInt = 0
    """End training after this many validation runs in a row without a new lowest loss. 0: never."""
    sample_interval: NonNegativeInt = 0
    """Iterations between two texts of 32 tokens that the model writes to the log. Each costs 32
    forward passes of a micro-batch, in a pipeline those of a global batch. 0: none."""
    sample_prompt: Annotated[str, Need("train.sample_interval", lambda train: train.sample_interval)] = ""
    """How these texts begin. Empty: with end-of-text."""
    profile: tuple[PositiveInt, PositiveInt] | None = None
    """[first, last]: iterations to profile to MODEL/profile: a Chrome trace and memory use."""
    profile_ranks: Annotated[list[NonNegativeInt], Need("train.profile", lambda train: train.profile)] = [0]
    """Ranks that write a profile."""
    save_interval: PositiveInt = 1000
    """Iterations between two checkpoints; one more is written at the end."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in CPU memory."""
    keep_last: NonNegativeInt = 0
    """Number of newest checkpoints to keep; older ones are removed. 0: keep all."""
    keep_every: Annotated[NonNegativeInt, Need("train.keep_last", lambda train: train.keep_last)] = 0
    """Checkpoints at multiples of this iteration are kept, regardless of keep_last. 0: none."""
    keep_best: bool = False
    """Save after every validation run with a new lowest loss, too, and never remove the checkpoint
    with the lowest one; MODEL/best names it."""
    allow_slow: bool = False
    """Start on CPUs although the first micro-batches predict a run of over four weeks."""
    allow_tight: bool = False
    """Start although the planner predicts that the memory will not suffice."""

    @property
    def warmup_end(self) -> int:
        """Number of warm-up iterations."""
        return self.warmup_iterations or round(self.warmup * self.iterations)

    @property
    def decay_end(self) -> int:
        """Iteration after which the learning rate stays at min_lr."""
        return self.decay_iterations or self.iterations

    @property
    def cooldown_length(self) -> int:
        """Number of iterations of the cooldown of wsd."""
        return self.cooldown_iterations or round(0.1 * self.decay_end)

    @field_validator("profile")
    @classmethod
    def _first_is_first(cls, profile: tuple[int, int] | None) -> tuple[int, int] | None:
        if profile and profile[0] > profile[1]:
            raise ValueError(f"[{profile[0]}, {profile[1]}] ends before it begins; give [first, last]")
        return profile

    @field_validator("split")
    @classmethod
    def _three_shares(cls, split: str) -> str:
        split_shares(split)
        return split

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.deterministic and self.attention in ("cudnn", "efficient"):
            raise ValueError(f"deterministic, but attention {self.attention} is not; set it to flash, math or auto")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}; lower it to lr or less")
        if self.warmup_end > self.iterations:
            raise ValueError(
                f"warmup_iterations {self.warmup_end} is longer than the run, {self.iterations} iterations; lower it, "
                "or raise iterations"
            )
        if 0 < self.decay_iterations < self.warmup_end:
            raise ValueError(
                f"decay_iterations {self.decay_iterations} is before the end of the warm-up, "
                f"{self.warmup_end} iterations; raise it, or shorten the warm-up"
            )
        return self


class WatchSettings(Section):
    """How the trainer reacts to non-finite numbers, loss spikes and hangs."""

    non_finite: Literal["stop", "skip"] = "stop"
    """Reaction to a loss or gradient that is NaN or infinite: stop before the weights change, or
    skip the step (ten consecutive skips stop training, too). float16 always skips, and stops when
    its loss scale has fallen to 1."""
    spike: Annotated[float, Field(ge=0)] = 1.0
    """Nats above the mean of the previous 100 losses that count as a spike. 0: none."""
    spike_reaction: Annotated[
        Literal["warn", "skip", "stop"], Need("watch.spike above 0", lambda watch: watch.spike)
    ] = "warn"
    """Reaction to a spike: warn, skip the step, too, or stop before the weights change."""
    silence_seconds: Annotated[float, Field(ge=0, le=1e8)] = 600
    """Seconds without progress after which each process prints its threads' stacks. 0: never."""


class LogSettings(Section):
    """Where training metrics go in addition to the log and the CSV files."""

    tensorboard: bool = True
    """Write TensorBoard event files to tensorboard/ in the model folder."""
    wandb: Name = ""
    """Weights & Biases project; empty: none. WANDB_MODE=offline keeps all on this machine."""
    peak_tflops: Annotated[float, Field(ge=0)] = 0
    """Dense peak of one device in TFLOP/s, for MFU. 0: looked up by the device's name."""


class EvaluateSettings(CheckedSection):
    """The held-out loss that `all` reports (`python -m training.evaluate`)."""

    max_tokens: PositiveInt = 250_000
    """Validation tokens to evaluate, in evenly spaced windows; as many as WikiText's test set."""
    batch: PositiveInt = 8
    """Windows, or requests of a task, per forward pass. The job asks for memory in proportion."""
    tasks: list[str] = []
    """Tasks of lm-evaluation-harness, such as lambada_openai (`pip install -e '.[eval]'`)."""
    task_dir: Annotated[Path | None, _TASKS] = None
    """Folder with YAML files of more tasks."""
    max_samples: Annotated[NonNegativeInt, _TASKS] = 0
    """The first samples of each task. 0: all."""


class GenerateSettings(CheckedSection):
    """The text sample that `all` ends with."""

    prompt: str = "The"
    """Text to continue."""
    max_tokens: Size = 64
    """Maximum number of tokens to generate."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] = 40
    """Sample among the k most likely tokens. 0: among all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens whose probabilities add up to this."""
    repetition_penalty: Annotated[float, Field(ge=1, le=100)] = 1.0
    """Factor that lowers the logits of tokens that the text already has. 1: none."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """A text ends before the first of these strings that is generated."""
    seed: Seed = 1
    """Seed of the sampling, below 2^64."""
    samples: Annotated[
        PositiveInt, Need("temperature above 0", lambda generate: generate.temperature > 0, refused=True)
    ] = 1
    """Texts to generate, with the seeds `seed`, `seed` + 1, …"""
    sources: bool = True
    """Show which spans of the texts stand verbatim in the training data, with URL and first
    iteration. The first time writes PREFIX.ngrams beside each dataset: .4 of the size of a
    PREFIX.bin of 2-byte tokens."""
