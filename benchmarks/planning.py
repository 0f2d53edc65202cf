"""The planner's predicted speed against published runs.

The runs are of other software. Megatron-LM of 2021 and 2022 differs from this trainer in three
points: it computes attention by separate kernels, which write and read every score and which its
selective recompute repeats; it keeps weights in the type of the products; and each of its tensor
ranks sends only a part to the next pipeline rank. "as theirs" is the prediction with these
differences; `ours` is the prediction for this trainer.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from benchmarks.harness import Row
from common.settings import ModelSettings
from training.planning.layout import Layout, Term, Workload
from training.planning.machines import Machine, machine
from training.planning.speed import BANDWIDTH, PRODUCTS, attention_seconds, flops_per_token, speed_terms


class Run(NamedTuple):
    """A run of published.yaml."""

    name: str
    source: str
    gpu: str
    model: ModelSettings
    layout: Layout
    seconds: float
    """Seconds per step."""
    calibrates: bool = False
    megatron: int = 0
    """Year of the Megatron-LM that ran it, 2021 or 2022; 0: other software."""


RUNS = [
    Run(**{**run, "model": ModelSettings(**run["model"]), "layout": Layout(**run["layout"])})
    for run in yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
]


def predict(run: Run) -> tuple[float, float]:
    """Seconds of a step in our software and in theirs."""
    target = machine(run.gpu, {})
    workload = Workload(run.model, "bfloat16", compiled=True)
    terms = speed_terms(workload, run.layout, target)
    ours = sum(term.value for term in terms)
    return ours, ours + (_more_in_megatron(run, workload, target, terms) if run.megatron else 0)


def error(run: Run) -> float:
    """Error of the prediction "as theirs", as a share of the published time."""
    return predict(run)[1] / run.seconds - 1


def _more_in_megatron(run: Run, workload: Workload, target: Machine, terms: list[Term]) -> float:
    """Seconds of a step more than ours: attention, less traffic of weights and of the pipeline."""
    layout, layers = run.layout, run.model.n_layer / run.layout.pipeline
    waited = 1 + (layout.pipeline - 1) / layout.virtual_stages / layout.accumulation  # the bubble grows in proportion
    attention = _separate_attention(run, workload, target) * layers * layout.accumulation
    parameters = layers * run.model.layer_parameters / layout.tensor
    memory = BANDWIDTH * target.gpu.memory_gb_per_s * 1e9
    weights = sum(term.value for term in terms if "accumulated" in term.name)
    accumulated = (10 if run.megatron == 2021 else 6) * parameters * layout.accumulation / memory  # fused in 2022
    transfers = sum(term.value for term in terms if term.name.startswith("activations and their gradients"))
    alike = 1 / layout.tensor if not layout.sequence_parallel else 1.0
    return waited * (attention - (weights - accumulated) - transfers * (1 - alike))


def _separate_attention(run: Run, workload: Workload, target: Machine) -> float:
    """Seconds per layer and micro-batch more than with flash attention.

    Four products and six passes forward and backward over all scores: 13 bytes per score forward
    (product, softmax, dropout and its mask, product) and 19 backward.
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
    if layout.recompute == "none" and layout.sequence_parallel:  # selective recompute repeats attention's core
        more += forward
    elif layout.recompute == "full":
        more += forward - our_forward
    return more


def measure(_arguments: Namespace) -> Iterator[Row]:
    """Predicted against published steps; the mean and the largest error of both sets."""
    for run in RUNS:
        layout, (ours, theirs) = run.layout, predict(run)
        peak = layout.world_size * 1e12 * machine(run.gpu, {}).gpu.bfloat16_tflops
        work = flops_per_token(run.model) * layout.global_batch_size * run.model.seq_len
        yield {
            "model": run.name,
            "source": run.source,
            "GPUs": f"{layout.world_size} {run.gpu}",
            "t x p x d": f"{layout.tensor} x {layout.pipeline} x {layout.data}",
            "b, m, v": f"{layout.micro_batch_size}, {layout.accumulation}, {layout.virtual_stages}",
            "published": f"{run.seconds:.3g} s",
            "as theirs": f"{theirs:.3g} s",
            "error": f"{100 * error(run):+.0f} %",
            "": "calibration" if run.calibrates else "held out",
            "ours": f"{ours:.3g} s",
            "ours, MFU": f"{100 * work / peak / ours:.0f} %",
        }
    for name, calibrates in (("calibration", True), ("held out", False)):
        errors = [100 * abs(error(run)) for run in RUNS if run.calibrates == calibrates]
        yield {"set": name, "runs": len(errors), "mean error %": sum(errors) / len(errors), "largest %": max(errors)}
