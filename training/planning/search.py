"""Finds the layouts that fit, and ranks them by their predicted speed.

ranked = search(workload, machine, Question(gpus=64, global_batch_size=512))
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Literal

from common.settings import ParallelSettings
from training.planning.flops import flops_per_token
from training.planning.layout import Layout
from training.planning.machines import Machine
from training.planning.memory import FEASIBLE, TIGHT, memory_terms, total
from training.planning.speed import speed_terms
from training.planning.terms import Term
from training.planning.workload import Workload

_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Prediction:
    """A layout with what it is predicted to take."""

    workload: Workload
    layout: Layout
    machine: Machine

    @cached_property
    def memory(self) -> list[Term]:
        """Bytes on the fullest GPU, by terms."""
        return memory_terms(self.workload, self.layout, self.machine)

    @cached_property
    def time(self) -> list[Term]:
        """Seconds of a step, by terms."""
        return speed_terms(self.workload, self.layout, self.machine)

    @cached_property
    def memory_bytes(self) -> float:
        """The peak on the fullest GPU."""
        return total(self.memory)

    @cached_property
    def step_seconds(self) -> float:
        """The time of an optimiser step."""
        return total(self.time)

    @property
    def verdict(self) -> str:
        """`feasible`, `tight` or `too large`."""
        share = self.memory_bytes / self.machine.memory
        return "feasible" if share < FEASIBLE else "tight" if share < TIGHT else "too large"

    @property
    def fits(self) -> bool:
        """Feasible or tight."""
        return self.verdict != "too large"

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.layout.global_batch_size * self.workload.model.seq_len / self.step_seconds

    @property
    def mfu(self) -> float:
        """The share of the peak that the model's work takes."""
        peak = self.layout.world_size * self.machine.peak_flops(self.workload.precision)
        return self.tokens_per_second * flops_per_token(self.workload.model) / peak

    @property
    def rank(self) -> tuple[object, ...]:
        """The order of predictions: feasible before tight, then the fastest; of equals, the simplest layout."""
        layout = self.layout
        simplest = (layout.pipeline, layout.tensor, layout.zero_stage, layout.virtual_stages, layout.recompute)
        return (self.verdict != "feasible", -round(self.tokens_per_second, 3), simplest, layout)


@dataclass(frozen=True)
class Question:
    """What is given; everything else is searched for."""

    gpus: int
    global_batch_size: int
    """Samples per step."""
    at_most: bool = False
    """The global batch size is an upper bound."""
    micro_batch_size: int = 0
    """0: any."""


def search(workload: Workload, machine: Machine, question: Question) -> list[Prediction]:
    """All layouts that fit, best first."""
    found = (Prediction(workload, layout, machine) for layout in layouts(workload, machine, question))
    return sorted((prediction for prediction in found if prediction.fits), key=lambda prediction: prediction.rank)


def nearest(given: Prediction, question: Question) -> Prediction | None:
    """The layout that fits with the fewest keys changed from `given`; of several, the fastest."""
    before = given.layout._asdict()

    def changes(prediction: Prediction) -> int:
        after = prediction.layout._asdict()
        return sum(before[key] != after[key] for key in before if key not in ("accumulation", "schedule"))

    found = search(given.workload, given.machine, question)
    return min(found, key=lambda prediction: (changes(prediction), prediction.rank), default=None)


def smallest(workload: Workload, machine: Machine, question: Question) -> Prediction | None:
    """The layout that takes the least memory; None if no layout takes the batch. A stand-in."""
    found = (Prediction(workload, layout, machine) for layout in layouts(workload, machine, question))
    return min(found, key=lambda prediction: (prediction.memory_bytes, prediction.layout), default=None)


def fewest_gpus(workload: Workload, machine: Machine, question: Question) -> int | None:
    """The least number of GPUs, of the question's doubled and doubled again, on which something fits. A stand-in."""
    gpus = question.gpus
    while gpus <= 2**12:
        found = smallest(workload, machine, replace(question, gpus=gpus))
        if found is not None and found.fits:
            return gpus
        gpus *= 2
    return None


def layouts(workload: Workload, machine: Machine, question: Question) -> Iterator[Layout]:
    """Every layout that the trainer accepts for a question, whether it fits or not."""
    model, gpus = workload.model, question.gpus
    for tensor, pipeline in product(_divisors(model.n_head), _divisors(gpus)):
        if gpus % (tensor * pipeline) or tensor > machine.per_node or pipeline > model.n_layer:
            continue
        data = gpus // (tensor * pipeline)
        sliced = tensor > 1 and model.seq_len % tensor == 0  # sequence parallelism only saves
        for virtual in _virtual_stages(model.n_layer, pipeline):
            schedule: Literal["1f1b", "interleaved_1f1b"] = "interleaved_1f1b" if virtual > 1 else "1f1b"
            takes = ParallelSettings(pipeline=pipeline, schedule=schedule, virtual_stages=virtual).takes
            shares = list(product(*_sharing(data, machine), ("none", "selective", "full")))
            for micro, accumulation in _batches(question, data, takes):
                for zero, offload, recompute in shares:
                    yield Layout(
                        *(tensor, sliced, pipeline, schedule, virtual, data, zero, offload, micro, accumulation),
                        recompute=recompute,
                    )


def _sharing(data: int, machine: Machine) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """ZeRO stages and offload."""
    if data == 1:
        return (0,), (False,)
    return (0, 1, 2, 3), (False,)


def _batches(question: Question, data: int, takes: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """(micro_batch_size, accumulation)."""
    for micro in [question.micro_batch_size] if question.micro_batch_size else _MICRO_BATCHES:
        accumulation, rest = divmod(question.global_batch_size, micro * data)
        while question.at_most and accumulation > 1 and not takes(accumulation):
            accumulation -= 1
        if accumulation and takes(accumulation) and (question.at_most or not rest):
            yield micro, accumulation


def _virtual_stages(n_layer: int, pipeline: int) -> list[int]:
    """Numbers of stages per rank that split the layers evenly; 1 always."""
    if pipeline == 1:
        return [1]
    return [1, *(number for number in (2, 3, 4, 6, 8) if n_layer % (pipeline * number) == 0)]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
