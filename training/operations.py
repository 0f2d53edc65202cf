"""Which operations a run uses where several compute the same: attention's kernel, and kernels of our own.

    choose_operations(experiment, world, folder)   # once per job, a collective call

What was measured is kept in MODEL_FOLDER/operations.json and used again by every later start with the same subject:
device, shapes, types and settings. So a resumed run computes in the same order, whatever else the GPU does that day.

Attention's kernel is PyTorch's: the one that the settings name, or the fastest for the run's shapes. Dropout decides as
much as the shape: cuDNN's kernel may be several times slower with it. The choice is global, so that compiled graphs
hold it as well.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from common.console import say
from common.errors import ConfigError, InputError
from common.files import read_json, write_json
from common.settings import Experiment, TrainSettings
from training.kernels import library
from training.launch.process_group import World
from training.parallel.collectives import all_gather, run_on_rank0
from training.precision import precision_type

_SWITCHES = {"flash": "flash", "cudnn": "cudnn", "efficient": "mem_efficient", "math": "math"}  # torch's names
ATTENTION = tuple(_SWITCHES)
REPEATABLE = ("flash", "math")
"""Those whose gradients are the same bits in every run under `torch.use_deterministic_algorithms`."""


class AttentionShape(NamedTuple):
    """The inputs of one layer's attention on one rank."""

    samples: int
    heads: int
    tokens: int
    head_size: int


def choose_operations(experiment: Experiment, world: World, folder: Path) -> None:
    """Read or measure the choice on rank 0, and apply it on all ranks (a collective call). On CPUs nothing is chosen.

    Raises ConfigError for a choice that the GPU or another setting rules out.
    """
    train, model, parallel = experiment.train, experiment.model, experiment.parallel
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product runs
        torch.use_deterministic_algorithms(True)
    if world.device.type != "cuda":
        return
    heads, head_size = model.n_head // parallel.tensor, model.n_embd // model.n_head
    shape = AttentionShape(train.micro_batch_size, heads, model.seq_len, head_size)
    dtype = precision_type(train.precision, world.device)
    subject = {
        "device": torch.cuda.get_device_name(world.device),
        "torch": torch.__version__,
        "shape": shape._asdict(),
        "dtype": str(dtype),
        "dropout": model.dropout,
        "settings": {key: getattr(train, key) for key in ("attention", "kernels", "deterministic", "compile")},
    }
    path = folder / "operations.json"

    def choose() -> dict[str, Any]:
        return _recorded(path, subject) or _measured(path, subject, shape, dtype, train, model.dropout)

    found = run_on_rank0(choose, world.rank)
    use_attention(found["attention"])
    missing = bool(found["kernels"]) and library.prepare(report=world.rank == 0) != ""
    lacking = any(all_gather(missing))  # the same on all ranks: replicas would drift apart
    library.select([] if lacking else found["kernels"])


def _recorded(path: Path, subject: dict[str, Any]) -> dict[str, Any] | None:
    """The choice of an earlier start; None if there is none for this subject."""
    try:
        recorded = read_json(path)
        if recorded["subject"] == subject and {"attention", "kernels"} <= recorded.keys():
            return dict(recorded)
    except (OSError, InputError, KeyError, TypeError):
        pass
    return None


def _measured(
    path: Path,
    subject: dict[str, Any],
    shape: AttentionShape,
    dtype: torch.dtype,
    train: TrainSettings,
    dropout: float,
) -> dict[str, Any]:
    """A new choice, which is recorded."""
    candidates = ATTENTION if train.attention == "auto" else (train.attention,)
    times = measure_attention(shape, dtype, dropout, candidates)
    kernel = fastest(times, train.deterministic)
    measured = ", ".join(f"{name} {time:.2f} ms" for name, time in times.items())
    say(f"attention: {kernel} ({measured} per layer, forward and backward)")
    # `auto` uses none until docs/kernels.md has the measurements of a GPU: torch.compile fuses the same operations
    kernels = library.KERNELS if train.kernels == "on" else ()
    found = {"subject": subject, "attention": kernel, "milliseconds": times, "kernels": kernels}
    write_json(path, found)
    return found


def use_attention(*kernels: str) -> None:
    """Let attention run in these kernels alone, from now on."""
    for name, switch in _SWITCHES.items():
        getattr(torch.backends.cuda, f"enable_{switch}_sdp")(name in kernels)


def measure_attention(
    shape: AttentionShape, dtype: torch.dtype, dropout: float, kernels: Sequence[str] = ATTENTION
) -> dict[str, float]:
    """Milliseconds of a forward and a backward pass on the current GPU, by kernel; those that cannot run are left out.

    The last one stays selected.
    """
    times = {}
    for kernel in kernels:
        use_attention(kernel)
        try:
            times[kernel] = _time(shape, dtype, dropout)
        except RuntimeError:  # no such kernel for this GPU, type or shape; or out of memory
            torch.cuda.empty_cache()
    return times


def fastest(times: dict[str, float], deterministic: bool = False) -> str:
    """The fastest kernel. Raises ConfigError if none can run."""
    allowed = {kernel: time for kernel, time in times.items() if kernel in REPEATABLE or not deterministic}
    if not allowed:
        raise ConfigError(
            "no allowed attention kernel runs on this GPU with these shapes; set train.attention to auto, or lower "
            "train.micro_batch_size"
        )
    return min(allowed, key=lambda kernel: allowed[kernel])


def _time(shape: AttentionShape, dtype: torch.dtype, dropout: float) -> float:
    from training.kernels.cases import milliseconds  # imports torch's benchmarks, which only a GPU needs

    # as the model makes them: heads are slices of one (B, T, 3C) product
    qkv = torch.randn(shape.samples, shape.tokens, shape.heads, 3, shape.head_size, dtype=dtype, device="cuda")
    q, k, v = (part.requires_grad_() for part in qkv.transpose(1, 2).unbind(dim=3))
    gradient = torch.randn_like(q)

    def run() -> None:
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        torch.autograd.grad(y, (q, k, v), gradient)

    return milliseconds(run)
