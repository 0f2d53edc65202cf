"""Finds the layouts that fit, and ranks them by their predicted speed.

    ranked = search(workload, machine, PlanRequest(gpus=64, global_batch_size=512))

Layouts that differ only in ZeRO stage and recompute are tried from the fastest to the one that
saves the most memory: memory-saving variants are listed only if no cheaper one is feasible.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from common.settings import Experiment
from training.parallel.sizes import bubble_share
from training.planning.layout import Layout, PlanRequest, Term, Workload, by_part, total
from training.planning.machines import Machine
from training.planning.memory import memory_terms
from training.planning.speed import busiest_traffic, flops_per_token, speed_terms

# shares of the memory: a layout is feasible below the first, tight below the second, and else too
# large
FEASIBLE, TIGHT = 0.80, 0.92
RECOMPUTE = ("none", "selective", "full")
"""From the fastest to the one that needs the least memory."""
_LARGEST_MICRO_BATCH = 128  # matrix products are as fast as they get well before that
_MOST_GPUS = 2**17  # where the search for the fewest GPUs gives up


@dataclass(frozen=True)
class Prediction:
    """A layout with its predicted memory and time."""

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
    def own_bytes(self) -> float:
        """The peak; on CPUs without the libraries, which all processes share."""
        on_cpu = self.machine.device == "cpu"
        return self.memory_bytes - (by_part(self.memory).get("context", 0.0) if on_cpu else 0.0)

    @property
    def verdict(self) -> str:
        """`feasible`, `tight` or `too large`; on CPUs only more than all memory is too large."""
        share = self.own_bytes / self.machine.memory
        limit = 1.0 if self.machine.device == "cpu" else TIGHT
        return "feasible" if share < FEASIBLE else "tight" if share < limit else "too large"

    @property
    def fits(self) -> bool:
        """Feasible or tight."""
        return self.verdict != "too large"

    @property
    def tokens_per_second(self) -> float:
        """The speed of all GPUs together."""
        return self.layout.global_batch_size * self.workload.model.seq_len / self.step_seconds

    @property
    def mfu(self) -> float:
        """The share of the peak that the model's work takes."""
        peak = self.layout.world_size * self.machine.peak_flops(self.workload.precision)
        return self.tokens_per_second * flops_per_token(self.workload.model, self.workload.attention) / peak

    @property
    def bubble_share(self) -> float:
        """The share of the step's time that a GPU waits for other stages of the pipeline."""
        return bubble_share(self.layout.pipeline, self.layout.virtual_stages, self.layout.accumulation)

    @property
    def links(self) -> tuple[float, float]:
        """Bytes that a GPU of the busiest rank sends per step, in its node and between nodes."""
        return busiest_traffic(self.workload, self.layout, self.machine).links

    @property
    def rank(self) -> tuple[object, ...]:
        """Sorting key: feasible before tight, then speed to four digits, then the simplest."""
        layout, speed = self.layout, float(f"{self.tokens_per_second:.4g}")
        simplest = (layout.pipeline, layout.tensor, layout.zero_stage, layout.virtual_stages)
        return (self.verdict != "feasible", -speed, simplest, RECOMPUTE.index(layout.recompute), layout)


def predict(experiment: Experiment, machine: Machine, attention: float = 1.0) -> Prediction:
    """Predict the memory and time of an experiment in its layout; `attention` as in `Workload`."""
    return Prediction(Workload.of(experiment, machine, attention), Layout.of(experiment), machine)


def search(workload: Workload, machine: Machine, request: PlanRequest) -> list[Prediction]:
    """The layouts that fit, best first; with offload only if nothing fits without it.

    Leaves out what cannot be better than a feasible layout of the list: the same layout with more
    recompute, or with a ZeRO stage higher than 1.
    """
    for offload in _offload_choices(machine):
        fitting = [
            prediction
            for mesh in _meshes(machine, workload, request)
            for layout in _batches(request, mesh)
            for prediction in _fitting(workload, machine, layout, offload)
        ]
        if fitting:
            return sorted(fitting, key=lambda prediction: prediction.rank)
    return []


def smallest(workload: Workload, machine: Machine, request: PlanRequest) -> Prediction | None:
    """The layout that takes the least memory; None if no layout takes the batch."""
    offload = _offload_choices(machine)[-1]
    predictions = (
        Prediction(workload, list(_savings(next(_batches(request, mesh)), offload and mesh.data > 1))[-1], machine)
        for mesh in _meshes(machine, workload, request)
    )
    return min(predictions, key=lambda prediction: (prediction.memory_bytes, prediction.layout), default=None)


def fewest_gpus(workload: Workload, machine: Machine, request: PlanRequest) -> int | None:
    """The smallest number of GPUs on which something fits, doubling the requested number."""
    gpus = request.gpus
    while gpus <= _MOST_GPUS:
        least = smallest(workload, machine, replace(request, gpus=gpus))
        if least is not None and least.fits:
            return gpus
        gpus *= 2
    return None


def _meshes(machine: Machine, workload: Workload, request: PlanRequest) -> Iterator[Layout]:
    """Ways to spread the model that some micro-batch suits; without ZeRO and recompute."""
    model, gpus = workload.model, request.gpus
    node = min(gpus, machine.per_node)
    for tensor, pipeline in product(_divisors(model.n_head), _divisors(gpus)):
        if gpus % (tensor * pipeline) or node % tensor or pipeline > model.n_layer:
            continue
        for virtual in (1, 2, 3, 4, 6, 8):
            if virtual > 1 and (pipeline == 1 or model.n_layer % (pipeline * virtual)):
                continue
            mesh = Layout(
                tensor=tensor,
                sequence_parallel=tensor > 1 and model.seq_len % tensor == 0,  # saves memory at no cost
                pipeline=pipeline,
                schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
                virtual_stages=virtual,
                data=gpus // (tensor * pipeline),
            )
            if any(_batches(request, mesh)):
                yield mesh


def _batches(request: PlanRequest, mesh: Layout) -> Iterator[Layout]:
    """The mesh with each micro-batch that the schedule takes, smallest first."""
    per_rank, rest = divmod(request.global_batch_size, mesh.data)
    if rest:
        return
    given, takes = request.micro_batch_size, mesh.parallel.takes
    for micro in [given] if given else range(1, min(per_rank, _LARGEST_MICRO_BATCH) + 1):
        accumulation, rest = divmod(per_rank, micro)
        if not rest and takes(accumulation):
            yield mesh._replace(micro_batch_size=micro, accumulation=accumulation)


def _savings(layout: Layout, offload: bool) -> Iterator[Layout]:
    """The layout with each ZeRO stage and recompute; the last one saves the most memory."""
    # under a pipeline, stage 2 is the same as 1
    stages = (0,) if layout.data == 1 else (0, 1, 3) if layout.pipeline > 1 else (0, 1, 2, 3)
    for zero, recompute in product(stages, RECOMPUTE):
        if zero or not offload:
            yield layout._replace(zero_stage=zero, recompute=recompute, offload=offload)


def _fitting(workload: Workload, machine: Machine, layout: Layout, offload: bool) -> Iterator[Prediction]:
    """The variants of a layout that fit and may be among the best; see `search`."""
    predictions = [Prediction(workload, saving, machine) for saving in _savings(layout, offload)]
    if not predictions or not predictions[-1].fits:
        return
    feasible: list[Layout] = []
    for prediction in predictions:
        if not any(_no_slower(other, prediction.layout) for other in feasible) and prediction.fits:
            yield prediction
            if prediction.verdict == "feasible":
                feasible.append(prediction.layout)


def _no_slower(one: Layout, other: Layout) -> bool:
    """Whether the first layout, which saves less memory, is at least as fast as the other.

    Stages 0 and 1 are both tried: 1 communicates as much as 0, and its optimizer has less to do.
    """
    less = RECOMPUTE.index(one.recompute) <= RECOMPUTE.index(other.recompute)
    return less and (one.zero_stage == other.zero_stage or 0 < one.zero_stage < other.zero_stage)


def _offload_choices(machine: Machine) -> tuple[bool, ...]:
    """The values of `offload` to try; a CPU cannot offload."""
    return (False, True) if machine.device == "cuda" else (False,)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
