"""Chooses the kernels of a run: attention's, and which of our own CUDA kernels are used.

    choose_operations(experiment, world, folder, seconds)   # once per job, a collective call

The choice is kept in MODEL_FOLDER/operations.json. Every later start with the same key (device,
shapes, types and settings) uses it again, so a resumed run computes in the same order regardless of
GPU load. Data and pipeline ranks are not part of the key: they only change how many parameters a
rank's optimiser updates.

Attention runs in one of PyTorch's kernels: the configured one, or the fastest for the run's shapes
and dropout (cuDNN's may be several times slower with dropout). The choice is global, so it holds in
compiled graphs, too.

Our own kernels are measured if the run takes an hour or more, for at most three minutes.
`choose_kernels` compares the results of each kernel with PyTorch's, then times its part of the step
with and without it.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from common.console import say
from common.errors import ConfigError, KernelError
from common.files import read_json, write_json
from common.settings import Experiment, ParallelSettings
from training.kernels import library
from training.kernels.cases import Shapes, cases, milliseconds, time_op, verify
from training.launch.device import precision_type
from training.launch.process_group import World
from training.launch.rank import starting
from training.model import Linear
from training.parallel.collectives import all_gather, run_on_rank0
from training.parallel.layout import build_model
from training.parallel.pipeline import Stage
from training.parallel.sizes import padded_vocab_size
from training.tensors import leaf_of

_SWITCHES = {"flash": "flash", "cudnn": "cudnn", "efficient": "mem_efficient", "math": "math"}  # torch's names
ATTENTION = tuple(_SWITCHES)
REPEATABLE = ("flash", "math")
"""Attention kernels with reproducible gradients under `torch.use_deterministic_algorithms`."""
SHORT_RUN = 3600.0
"""Runs of fewer seconds measure no kernels."""
BUDGET = 180.0
"""Upper limit on the time for measuring kernels, in seconds."""
_GAIN = 0.99  # a kernel must save 1 % of its part's time: repeated measurements differ by less


AttentionShape = tuple[int, int, int, int]
"""(B, nh, T, hs): samples, heads, tokens and head size of one layer's attention on one rank."""


def choose_operations(experiment: Experiment, world: World, folder: Path, seconds: float | None = 0.0) -> None:
    """Choose on rank 0 and apply the choice on all ranks (a collective call); nothing on CPUs.

    `seconds` is the predicted duration of the run, None if unknown; with the default, `kernels:
    auto` measures nothing. Raises ConfigError for a choice that the GPU or another setting rules
    out. Does nothing on CPUs.
    """
    train, model, parallel = experiment.train, experiment.model, experiment.parallel
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product runs
        torch.use_deterministic_algorithms(True)
    if world.device.type != "cuda":
        return
    heads, head_size = model.n_head // parallel.tensor, model.n_embd // model.n_head
    shape = (train.micro_batch_size, heads, model.seq_len, head_size)
    dtype = precision_type(train.precision, world.device)
    key = {
        "device": torch.cuda.get_device_name(world.device),
        "torch": torch.__version__,
        "shape": dict(zip(("samples", "heads", "tokens", "head_size"), shape, strict=True)),
        "tensor": parallel.tensor,
        "dtype": str(dtype),
        "dropout": model.dropout,
        "settings": {
            name: getattr(train, name)
            for name in ("attention", "kernels", "deterministic", "compile", "recompute", "reset_attention_mask")
        },
    }
    path = folder / "operations.json"

    def choose() -> dict[str, Any]:
        recorded: dict[str, Any] = read_json(path) if path.exists() else {}
        if recorded.get("subject") == key:
            return recorded
        starting(world.rank, "measures the kernels of attention")
        attention, times = _choose_attention(experiment, shape, dtype)
        use_attention(attention)  # the timed blocks have it, too
        starting(world.rank, "chooses our own kernels, which may be compiled and measured for minutes")
        kernels = _choose_kernels(experiment, world.device, seconds)
        chosen = {"subject": key, "attention": attention, "milliseconds": times, **kernels._asdict()}
        write_json(path, chosen)
        return chosen

    chosen = run_on_rank0(choose, world.rank)  # the others wait, up to the process group's 30 minutes
    use_attention(chosen["attention"])
    failed = bool(chosen["kernels"]) and library.prepare(report=world.rank == 0) != ""
    # all ranks use the same kernels, or replicas would drift apart
    library.select([] if any(all_gather(failed)) else chosen["kernels"])


def _choose_attention(
    experiment: Experiment, shape: AttentionShape, dtype: torch.dtype
) -> tuple[str, dict[str, float]]:
    """The configured kernel or the fastest one, and the milliseconds of each."""
    train = experiment.train
    candidates = ATTENTION if train.attention == "auto" else (train.attention,)
    if train.reset_attention_mask:  # only these take a mask; FlashAttention on documents is not one of PyTorch's
        candidates = ("math" if train.deterministic else "efficient",)
    times = measure_attention(shape, dtype, experiment.model.dropout, candidates)
    kernel = fastest(times, train.deterministic)
    measured = ", ".join(f"{name} {time:.2f} ms" for name, time in times.items())
    say(f"attention: {kernel} ({measured} per layer, forward and backward)")
    return kernel, times


def use_attention(*kernels: str) -> None:
    """Restrict attention to these kernels, in the whole process."""
    for name, switch in _SWITCHES.items():
        getattr(torch.backends.cuda, f"enable_{switch}_sdp")(name in kernels)


def measure_attention(
    shape: AttentionShape, dtype: torch.dtype, dropout: float, kernels: Sequence[str] = ATTENTION
) -> dict[str, float]:
    """Milliseconds of a forward and backward pass per usable kernel; the last stays selected."""
    times = {}
    for kernel in kernels:
        use_attention(kernel)
        try:
            times[kernel] = _time_attention(shape, dtype, dropout)
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


def _time_attention(shape: AttentionShape, dtype: torch.dtype, dropout: float) -> float:
    # as the model makes them: heads are slices of one (B, T, 3C) product
    samples, heads, tokens, head_size = shape
    qkv = torch.randn(samples, tokens, heads, 3, head_size, dtype=dtype, device="cuda")
    q, k, v = (part.requires_grad_() for part in qkv.transpose(1, 2).unbind(dim=3))
    gradient = torch.randn_like(q)

    def run() -> None:
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        torch.autograd.grad(y, (q, k, v), gradient)

    return milliseconds(run)


class Choice(NamedTuple):
    """The kernels to use, and a line per measured kernel that says why."""

    kernels: list[str]
    reasons: list[str]


def _choose_kernels(experiment: Experiment, device: torch.device, seconds: float | None) -> Choice:
    """Choose by `train.kernels` for a run of `seconds`, and print the reasons."""
    if experiment.train.kernels != "auto":
        return Choice(list(library.KERNELS) if experiment.train.kernels == "on" else [], [])
    end = time.monotonic() + BUDGET  # includes compiling the kernels
    if seconds is not None and seconds < SHORT_RUN:
        choice = Choice([], ["none: the plan predicts less than an hour, too short to measure them"])
    elif failure := library.prepare(report=True):
        choice = Choice([], [f"none: {failure}"])
    else:
        choice = measure_kernels(experiment, device, end)
    for reason in choice.reasons:
        say(f"kernels: {reason}")
    return choice


def measure_kernels(experiment: Experiment, device: torch.device, end: float) -> Choice:
    """Choose among all kernels, until time.monotonic() is `end`."""
    shapes = replace(rank_shapes(experiment, device), samples=1, n_layer=1, vocabulary=128)  # enough to compare results
    by_kernel = {case.kernel: case for case in cases(shapes, device)}
    parts = {kernel: case.part for kernel, case in by_kernel.items()}
    measure = partial(time_part, experiment=experiment, device=device)
    return choose_kernels(parts, lambda kernel: verify(by_kernel[kernel]), measure, end)


def choose_kernels(
    parts: Mapping[str, str],
    check: Callable[[str], None],
    measure: Callable[[str, Sequence[str]], float],
    end: float,
    clock: Callable[[], float] = time.monotonic,
) -> Choice:
    """Choose among kernels until the clock shows `end`; `parts` maps each to its part of the step.

    `check` raises KernelError if a kernel's results are wrong. `measure` times a part with some
    kernels, in milliseconds. A kernel is used if it speeds up its part beyond the kernels chosen
    before it. A measurement is skipped if it would end too late, taking as long as the longest one
    so far.
    """
    used: list[str] = []
    reasons: list[str] = []
    times: dict[str, float] = {}  # by part, with the kernels used so far
    longest = 0.0

    def run(action: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal longest
        begun = clock()
        if begun + longest >= end:
            raise KernelError(f"no time was left of the {BUDGET:.0f} s for measuring")
        result = action(*arguments)
        longest = max(longest, clock() - begun)
        return result

    for kernel, part in parts.items():
        try:
            run(check, kernel)
            before = times[part] = times.get(part) or run(measure, part, used)
            after = run(measure, part, [*used, kernel])
        except (RuntimeError, KernelError) as error:  # also: out of memory, or not compiled
            reasons.append(f"{kernel} is not used: {(str(error).splitlines() or [''])[0]}")
            continue
        faster = after < _GAIN * before
        reasons.append(
            f"{kernel} is{' not' * (not faster)} used: {part} {before:.3f} ms without it, {after:.3f} ms with"
        )
        if faster:
            used, times[part] = [*used, kernel], after
    return Choice(used, reasons)


def rank_shapes(experiment: Experiment, device: torch.device) -> Shapes:
    """The shapes that the kernels get on the first rank."""
    model, train, parallel = experiment.model, experiment.train, experiment.parallel
    return Shapes(
        samples=train.micro_batch_size,
        seq_len=model.seq_len,
        n_layer=-(-model.n_layer // parallel.pipeline),
        n_embd=model.n_embd,
        vocabulary=padded_vocab_size(model.vocab_size, parallel.tensor) // parallel.tensor,
        dropout=model.dropout,
        dtype=str(precision_type(train.precision, device)).removeprefix("torch."),
        tensor=parallel.tensor,
        shards=parallel.data if parallel.zero_stage else 1,
    )


def time_part(part: str, kernels: Sequence[str], experiment: Experiment, device: torch.device) -> float:
    """Time a part of a step on one rank with these kernels, without communication, in milliseconds.

    `block` is one layer and `loss` is the head and the loss, both forward and backward, compiled as
    in the run; `optimizer` is the gradient norm and AdamW.
    """
    try:
        if part == "optimizer":
            shapes = rank_shapes(experiment, device)
            return sum(time_op(case, case.kernel in kernels) for case in cases(shapes, device) if case.part == part)
        stage, shape = one_layer(experiment, device), (experiment.train.micro_batch_size, experiment.model.seq_len)
        tokens = torch.randint(stage.model.wte.num_embeddings, shape, device=device)
        x = stage.model.embed(tokens).detach().requires_grad_()

        def run() -> None:
            out: Tensor = stage.model.h["0"](x) if part == "block" else stage.loss(x, tokens, None)
            torch.autograd.backward(out, torch.ones_like(out))

        with library.using(kernels):
            return milliseconds(run)
    finally:
        torch.compiler.reset()  # drops the graphs of these measurements
        if device.type == "cuda":
            torch.cuda.empty_cache()


def one_layer(experiment: Experiment, device: torch.device) -> Stage:
    """The run's model with one layer that has a rank's shards of the matrices, without collectives.

    Under sequence parallelism its LayerNorms take the whole sequence.
    """
    model, train, tensor = experiment.model, experiment.train, experiment.parallel.tensor
    changed = {
        "model": model.model_copy(update={"n_layer": 1, "vocab_size": rank_shapes(experiment, device).vocabulary}),
        "parallel": ParallelSettings(),
        "train": train.model_copy(update={"compile": "blocks"} if train.compile == "model" else {}),
    }
    (stage,) = build_model(experiment.model_copy(update=changed), None, device)
    for name, module in stage.model.named_modules():
        if isinstance(module, Linear):
            split = leaf_of(f"{name}.weight").split or 0
            module.weight.data = module.weight.data.chunk(tensor, split)[0].contiguous()
            module.bias.data = module.bias.data.chunk(1 if split else tensor)[0]
    stage.keep_rounded_weights()
    stage.round_weights()
    return stage
