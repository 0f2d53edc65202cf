"""The optimiser step: ours in its variants, a compiled nanoGPT-style loop and transformers, all in the same run.

bfloat16, sequences of 1,024 tokens, the same random words for all. Ours is the trainer's own step, reading its data
included; MFU is that of training.planning.flops, 6 (N - wpe) + 12 L h s per token over the device's dense peak (989
TFLOP/s for an H100 or H200); the other share is that of the fastest bfloat16 product measured in the same run. The
first step compiles; a few steps follow to warm up, then 10 are timed together. The initial weights are drawn on the
GPU, which takes less of the time that is short.
"""

import gc
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from benchmarks.gpu.clock import forget_peak, peak_gigabytes, seconds
from benchmarks.gpu.items import Context, Item, LeftOutError, Row
from benchmarks.step import ours
from benchmarks.step_peers import Steps, nanogpt, transformers
from benchmarks.training_job import SIZES, Job, Size, write_dataset
from common.settings import ModelSettings, TrainSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TITLE = "The step: tokens per second on one GPU, bfloat16"

_STEPS: Mapping[str, Callable[[Job], Steps]] = {"ours": ours, "nanoGPT-style": nanogpt, "transformers": transformers}
_TIMED, _WARM_UP = 10, 2
_XL = Size(ModelSettings(n_layer=48, n_embd=1600, n_head=25, seq_len=1024, dropout=0), 8, 1)
_SIZES = {**SIZES, "1.5b": _XL}
_TOY = Size(ModelSettings(n_layer=2, n_head=2, n_embd=32, seq_len=16, vocab_size=256, dropout=0), 2, 1)
_COMPILING = {"none": 10, "blocks": 30, "model": 90}  # seconds, a guess for 24 layers


@dataclass(frozen=True)
class Variant:
    """A row of the table."""

    size: str
    micro: int
    step: str = "ours"
    dropout: float = 0.0
    train: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the defaults of the `train` section."""

    @property
    def text(self) -> str:
        """`compile model`."""
        return ", ".join(f"{key} {_word(value)}" for key, value in self.train.items())

    @property
    def name(self) -> str:
        """`345m, micro-batch 16, ours, dropout 0.1, compile model`."""
        parts = [self.size, f"micro-batch {self.micro}", self.step, f"dropout {self.dropout:g}", self.text]
        return ", ".join(part for part in parts if part)

    @property
    def seconds(self) -> float:
        """A guess of how long the row takes."""
        whole = {"nanoGPT-style": "model", "transformers": "none"}
        mode = whole.get(self.step) or self.train.get("compile", "blocks")
        return 8 + _COMPILING[mode] * (2 if self.size == "1.5b" else 1)


def _word(value: object) -> str:
    return {True: "on", False: "off"}.get(value, "") if isinstance(value, bool) else str(value)


def _variants() -> list[Variant]:
    """All rows, the most informative first."""
    micro_batches = [Variant("345m", 16), Variant("345m", 32)]
    peers = [
        Variant("345m", 16, "nanoGPT-style"),
        Variant("345m", 16, dropout=0.1),
        Variant("345m", 16, "transformers"),
    ]
    others = [Variant("345m", 64), Variant("345m", 8), Variant("124m", 32), Variant("1.5b", 8)]
    changed: list[dict[str, Any]] = [
        {"kernels": "off"},
        {"kernels": "on"},
        {"compile": "model"},
        {"attention": "cudnn"},
        {"attention": "flash"},
        {"loss": "chunked"},
        {"compile": "none"},
        {"compile": "none", "kernels": "on"},
        {"compile": "none", "kernels": "off"},
        {"deterministic": True},
    ]
    ways = [Variant("345m", 16, train=train) for train in changed]
    rest = [
        Variant("345m", 32, dropout=0.1),
        Variant("345m", 16, dropout=0.1, train={"attention": "cudnn"}),
        Variant("345m", 16, dropout=0.1, train={"kernels": "on"}),
        Variant("345m", 16, "nanoGPT-style", dropout=0.1),
        Variant("124m", 64),
        Variant("124m", 32, "nanoGPT-style"),
        Variant("1.5b", 16),
        Variant("1.5b", 8, train={"recompute": "selective"}),
        Variant("345m", 32, train={"compile": "model"}),
        Variant("345m", 64, train={"loss": "chunked"}),
    ]
    return [*micro_batches, *peers, *others, *ways, *rest]


VARIANTS = {variant.name: variant for variant in _variants()}


def items(_toy: bool) -> list[Item]:
    """An item per row."""
    return [
        # the switch to deterministic operations, and what the libraries read then, end with the process
        Item("step", name, variant.seconds, alone=bool(variant.train.get("deterministic")))
        for name, variant in VARIANTS.items()
    ]


def job_of(variant: Variant, context: Context) -> Job:
    """The work of a row, on random words that all rows share. Raises LeftOutError for a key that the trainer lacks."""
    missing = [key for key in variant.train if key not in TrainSettings.model_fields]
    if missing:
        raise LeftOutError(f"the trainer has no train.{missing[0]}")
    size = _TOY if context.toy else _SIZES[variant.size]
    model = size.model.model_copy(update={"dropout": variant.dropout})
    micro = max(1, variant.micro // 8) if context.toy else variant.micro
    job = Job(context.folder / "data", size._replace(model=model, micro_batch_size=micro), train=variant.train)
    if not job.settings.dataset_prefix.parent.exists():
        write_dataset(job)
    return job


@contextmanager
def running(variant: Variant, context: Context) -> "Iterator[tuple[Generator[Tensor | float, None, None], Job]]":
    """The steps of a row, which begin with the first `next`; afterwards everything that they changed is undone."""
    import torch

    from training.kernels import library

    device = torch.device("cuda" if context.gpu else "cpu")
    job = job_of(variant, context)
    steps = cast("Generator[Tensor | float, None, None]", _STEPS[variant.step](job))
    with patch("training.parallel.layout.initial_value", drawn_on(device)):
        try:
            yield steps, job
        finally:
            steps.close()
            enable_attention()
            library.select(())
            clean_up()


def _attention_switches() -> dict[str, tuple[Callable[[], bool], Callable[[bool], None]]]:
    """PyTorch's attention kernels: whether each is enabled, and what enables it."""
    import torch

    cuda = torch.backends.cuda
    return {
        "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    }


def enable_attention() -> None:
    """Let PyTorch choose among all attention kernels again."""
    for _, enable in _attention_switches().values():
        enable(True)


def _attention() -> str | None:
    """The attention kernel that is chosen; None if PyTorch chooses."""
    enabled = [name for name, (is_enabled, _) in _attention_switches().items() if is_enabled()]
    return enabled[0] if len(enabled) == 1 else None


def drawn_on(device: "torch.device") -> "Callable[[str, torch.Size, ModelSettings, int], Tensor]":
    """What replaces `initial_value` in the trainer: initial weights that are drawn on the device."""
    import torch
    from torch import Tensor

    from training.model import INIT_STD

    def value(name: str, shape: torch.Size, *_: object) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, float(name.endswith("weight")), device=device)
        return torch.empty(shape, device=device).normal_(0.0, INIT_STD)

    return value


def clean_up() -> None:
    """Free what an item has left on the device, and forget its compiled graphs."""
    import torch

    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(item: Item, context: Context) -> Iterator[Row]:
    """The row of a variant."""
    import torch

    from training.metrics.peak import peak_tflops
    from training.planning.flops import flops_per_token

    device = torch.device("cuda" if context.gpu else "cpu")
    variant = VARIANTS[item.name]
    forget_peak(device)
    with running(variant, context) as (steps, job):
        first = seconds(lambda: next(steps), device)
        list(islice(steps, _WARM_UP))
        count = 2 if context.toy else _TIMED
        losses: list[Tensor | float] = []
        taken = seconds(lambda: losses.extend(islice(steps, count)), device) / count
        tokens = job.size.micro_batch_size * job.size.model.seq_len / taken
        work, peak = flops_per_token(job.size.model) * tokens, peak_tflops(device, "bfloat16")
        yield {
            "size": variant.size,
            "micro": variant.micro,
            "step": variant.step,
            "dropout": variant.dropout,
            "variant": variant.text,
            "tokens/s": tokens,
            "ms": taken * 1000,
            "MFU %": 100 * work / 1e12 / peak if peak else None,
            "of a product %": 100 * work / context.product if context.product and context.gpu else None,
            "peak GB": peak_gigabytes(device),
            "attention": _attention(),
            "loss by plan GB": _planned_loss(job, device) if variant.step == "ours" else None,
            "build and first step, s": first,
            "loss": float(losses[-1]),
        }


def _planned_loss(job: Job, device: "torch.device") -> float:
    """What the plan says of the loss's peak, in GB."""
    from training.logits_memory import peak_bytes
    from training.parallel.layout import compile_mode, loss_chunks

    experiment, model = job.settings.models["step"], job.size.model
    tokens, compiled = job.size.micro_batch_size * model.seq_len, compile_mode(experiment, device) != "none"
    element = 2 if device.type == "cuda" else 4
    return peak_bytes(tokens, model.n_embd, job.size.rows, element, loss_chunks(experiment, device), compiled) / 1e9
