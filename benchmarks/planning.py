"""The planner's predicted speed against published runs.

    python -m benchmarks.planning

The runs are other software's. Megatron-LM of 2021 and 2022 computes attention by separate kernels, which write and read
every score, and its selective recompute repeats them; it keeps weights in the type of the products; its tensor ranks
each send a part of what goes to the next pipeline rank. These three differences are put into the prediction before it
is compared ("as theirs"); `ours` is what is predicted for this trainer. Everything else is taken as equal.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from tabulate import tabulate

from common import cli
from common.settings import ModelSettings
from training.planning.layout import Layout, Term, Workload
from training.planning.machines import Machine, machine
from training.planning.speed import BANDWIDTH, PRODUCTS, attention_seconds, flops_per_token, speed_terms

_NARAYANAN = "Narayanan et al. 2021, table 1"  # micro-batches and virtual stages: Megatron-LM, examples/sc21
_KORTHIKANTI = "Korthikanti et al. 2022, table 5"
_LLMC, _TORCH = "llm.c", "PyTorch"


class Run(NamedTuple):
    """A published run."""

    name: str
    source: str
    gpu: str
    model: ModelSettings
    layout: Layout
    seconds: float
    """Of a step, as published or from the published rate."""
    calibrates: bool = False
    megatron: bool = False
    """Megatron-LM of 2021 or 2022."""
    attention_again: bool = False
    """Selective recompute repeats attention's core instead of what ours repeats."""


class Outcome(NamedTuple):
    """A run, predicted."""

    run: Run
    ours: float
    theirs: float

    @property
    def error(self) -> float:
        """Of the prediction for their software, as a share of the published time."""
        return self.theirs / self.run.seconds - 1


def predict(run: Run) -> Outcome:
    """The step time of a run in our software and in theirs."""
    target = machine(run.gpu, {})
    workload = Workload(run.model, "bfloat16", compiled=True)
    terms = speed_terms(workload, run.layout, target)
    ours = sum(term.value for term in terms)
    return Outcome(run, ours, ours + _more_in_megatron(run, workload, target, terms) if run.megatron else ours)


def _more_in_megatron(run: Run, workload: Workload, target: Machine, terms: list[Term]) -> float:
    """Seconds of a step more than in ours: attention, less the weights' traffic and the pipeline's."""
    layout, layers = run.layout, run.model.n_layer / run.layout.pipeline
    waited = 1 + (layout.pipeline - 1) / layout.virtual_stages / layout.accumulation  # the bubble grows as the rest
    attention = _separate_attention(run, workload, target) * layers * layout.accumulation
    parameters = layers * run.model.layer_parameters / layout.tensor
    memory = BANDWIDTH * target.gpu.memory_gb_per_s * 1e9
    weights = sum(term.value for term in terms if "accumulated" in term.name)
    accumulated = (10 if run.source == _NARAYANAN else 6) * parameters * layout.accumulation / memory  # fused in 2022
    transfers = sum(term.value for term in terms if term.name.startswith("activations and their gradients"))
    alike = 1 / layout.tensor if not layout.sequence_parallel else 1.0
    return waited * (attention - (weights - accumulated) - transfers * (1 - alike))


def _separate_attention(run: Run, workload: Workload, target: Machine) -> float:
    """Seconds per layer and micro-batch more than with flash attention.

    Four products and six passes forward and backward over all scores: 13 bytes per score forward (product, softmax,
    dropout and its mask, product) and 19 backward.
    """
    model, layout = run.model, run.layout
    scores = layout.micro_batch_size * model.n_head / layout.tensor * model.seq_len**2
    flops = PRODUCTS * target.peak_flops(workload.precision)
    memory = BANDWIDTH * target.gpu.memory_gb_per_s * 1e9
    head_size = model.n_embd // model.n_head
    forward = scores * (4 * head_size / flops + 13 / memory)
    backward = scores * (8 * head_size / flops + 19 / memory)
    our_forward, our_backward = attention_seconds(workload, layout, target)
    more = forward + backward - our_forward - our_backward
    if run.attention_again:
        more += forward
    elif layout.recompute == "full":
        more += forward - our_forward
    return more


def _narayanan(
    name: str, heads: int, width: int, layers: int, tensor: int, pipeline: int, gpus: int, batch: int, tflops: float,
    micro: int, virtual: int = 1, calibrates: bool = False,
) -> Run:  # fmt: skip
    vocab, seq = 51_200, 2048
    model = ModelSettings(n_layer=layers, n_head=heads, n_embd=width, seq_len=seq, vocab_size=vocab)
    data = gpus // (tensor * pipeline)
    layout = Layout(
        tensor=tensor, pipeline=pipeline, virtual_stages=virtual, data=data, recompute="full",
        micro_batch_size=micro, accumulation=batch // (micro * data),
    )  # fmt: skip
    work = 96 * batch * seq * layers * width**2 * (1 + seq / (6 * width) + vocab / (16 * layers * width))
    return Run(name, _NARAYANAN, "a100-80g", model, layout, work / gpus / (tflops * 1e12), calibrates, True)


def _korthikanti(
    name: str, heads: int, width: int, layers: int, pipeline: int, virtual: int, batch: int, micro: int,
    full: float, selective: float, calibrates: bool = False,
) -> list[Run]:  # fmt: skip
    model = ModelSettings(n_layer=layers, n_head=heads, n_embd=width, seq_len=2048, vocab_size=51_200)
    layout = Layout(
        tensor=8, pipeline=pipeline, virtual_stages=virtual, micro_batch_size=micro, accumulation=batch // micro,
        recompute="full",
    )  # fmt: skip
    sliced = layout._replace(recompute="none", sequence_parallel=True)
    return [
        Run(f"{name} full", _KORTHIKANTI, "a100-80g", model, layout, full, calibrates, True),
        Run(f"{name} selective", _KORTHIKANTI, "a100-80g", model, sliced, selective, calibrates, True, True),
    ]


def _gpt2(
    name: str, source: str, gpu: str, gpus: int, micro: int, accumulation: int, rate: float, calibrates: bool = False
) -> Run:
    """A GPT-2 by its tokens per second and GPU."""
    layers, heads, width = {"124M": (12, 12, 768), "350M": (24, 16, 1024), "1.5B": (48, 25, 1600)}[name]
    model = ModelSettings(n_layer=layers, n_head=heads, n_embd=width, dropout=0)
    layout = Layout(data=gpus, zero_stage=int(gpus > 1), micro_batch_size=micro, accumulation=accumulation)
    return Run(name, source, gpu, model, layout, layout.global_batch_size * 1024 / gpus / rate, calibrates)


RUNS = [
    _narayanan("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137, 16, calibrates=True),
    _narayanan("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138, 16),
    _narayanan("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142, 16),
    _narayanan("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135, 8),
    _narayanan("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138, 4),
    _narayanan("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    _narayanan("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    _narayanan("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    _narayanan("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
    _narayanan("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 163, 1),
    *_korthikanti("22B", 64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10, calibrates=True),
    *_korthikanti("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    *_korthikanti("530B", 128, 20480, 105, 35, 3, 280, 1, 49.05, 37.83),
    *_korthikanti("1T", 160, 25600, 128, 64, 1, 512, 1, 94.42, 71.49),
    _gpt2("124M", _LLMC, "h100", 8, 64, 1, 468e3),
    _gpt2("350M", _LLMC, "h100", 8, 64, 1, 188e3),
    _gpt2("1.5B", _LLMC, "h100", 8, 16, 8, 48.5e3),
    _gpt2("350M", _LLMC, "a100-80g", 8, 64, 1, 0.62 * 312e12 / 2.425e9),
    _gpt2("124M", _TORCH, "h100", 1, 64, 8, 349e3),
    _gpt2("1.5B", _TORCH, "h100", 8, 16, 8, 40e3, calibrates=True),
]


def row(outcome: Outcome) -> dict[str, str]:
    """A line of the table."""
    run, layout = outcome.run, outcome.run.layout
    peak = layout.world_size * 1e12 * machine(run.gpu, {}).gpu.bfloat16_tflops
    work = flops_per_token(run.model) * layout.global_batch_size * run.model.seq_len
    return {
        "model": run.name,
        "source": run.source,
        "GPUs": f"{layout.world_size} {run.gpu}",
        "t x p x d": f"{layout.tensor} x {layout.pipeline} x {layout.data}",
        "b, m, v": f"{layout.micro_batch_size}, {layout.accumulation}, {layout.virtual_stages}",
        "published": f"{run.seconds:.3g} s",
        "as theirs": f"{outcome.theirs:.3g} s",
        "error": f"{100 * outcome.error:+.0f} %",
        "": "calibration" if run.calibrates else "held out",
        "ours": f"{outcome.ours:.3g} s",
        "ours, MFU": f"{100 * work / peak / outcome.ours:.0f} %",
    }


def summary(outcomes: Sequence[Outcome]) -> str:
    """The mean and the largest error of both sets."""
    lines = []
    for name, chosen in (("calibration", True), ("held out", False)):
        errors = [abs(outcome.error) for outcome in outcomes if outcome.run.calibrates == chosen]
        mean, largest = 100 * sum(errors) / len(errors), 100 * max(errors)
        lines.append(f"{name}: {len(errors)} runs, mean error {mean:.0f} %, largest {largest:.0f} %")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    cli.parser("benchmarks.planning", __doc__).parse_args(argv)
    outcomes = [predict(run) for run in RUNS]
    print(tabulate([row(outcome) for outcome in outcomes], headers="keys", tablefmt="github", disable_numparse=True))
    print(f"\n{summary(outcomes)}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
