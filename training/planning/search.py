"""Finds the layouts that fit, and ranks them by their predicted speed.

    ranked = search(workload, machine, Question(gpus=64, global_batch_size=512))

Most layouts are never predicted: of those that differ only in ZeRO stage, recompute or micro-batch, one that saves more
memory is tried only where the ones that save less do not fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from training.parallel.stages import bubble_share
from training.planning.candidates import (
    RECOMPUTE,
    Question,
    batches,
    layouts,
    meshes,
    offload_choices,
    zero_stages,
)
from training.planning.flops import flops_per_token
from training.planning.layout import Layout
from training.planning.machines import Machine
from training.planning.memory import FEASIBLE, TIGHT, memory_terms, total
from training.planning.speed import Links, links, speed_terms
from training.planning.terms import Term, by_part
from training.planning.workload import Workload

__all__ = ["Prediction", "Question", "fewest_gpus", "layouts", "nearest", "search", "smallest"]

_MOST_GPUS = 2**17  # where the search for enough of them ends


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
    def uncalibrated(self) -> str:
        """Why the speed deserves little trust: no published run like it was compared (docs/planning.md); or empty."""
        if self.machine.name.partition("-")[0] not in ("a100", "h100"):
            return "only A100s and H100s were compared with published runs; V100s were predicted 27 to 65 % too fast"
        if self.layout.world_size == 1 and self.workload.model.parameters < 1e9:
            return "small models on one GPU were predicted 27 to 65 % too fast"
        return ""

    @property
    def bubble_share(self) -> float:
        """The share of the step's time that a GPU waits for other stages of the pipeline."""
        return bubble_share(self.layout.pipeline, self.layout.virtual_stages, self.layout.accumulation)

    @cached_property
    def links(self) -> Links:
        """Bytes that a GPU of the busiest pipeline rank sends per step."""
        return links(self.workload, self.layout, self.machine)

    @property
    def rank(self) -> tuple[object, ...]:
        """The order of predictions: feasible before tight, then the fastest; of equals, the simplest layout.

        Speeds that agree in four digits count as equal.
        """
        layout, speed = self.layout, float(f"{self.tokens_per_second:.4g}")
        simplest = (layout.pipeline, layout.tensor, layout.zero_stage, layout.virtual_stages)
        return (self.verdict != "feasible", -speed, simplest, RECOMPUTE.index(layout.recompute), layout)


def search(workload: Workload, machine: Machine, question: Question) -> list[Prediction]:
    """The layouts that fit, best first; offload only where nothing fits without it.

    Left out is what cannot be better than a feasible layout of the list: the same with more recompute, or with a higher
    ZeRO stage than 1.
    """
    found: list[Prediction] = []
    for offload in offload_choices(machine):
        if not found:
            found = [
                prediction
                for mesh in meshes(workload, machine, question)
                for prediction in _fitting(workload, machine, question, mesh, offload)
            ]
    return sorted(found, key=lambda prediction: prediction.rank)


def nearest(given: Prediction, question: Question) -> Prediction | None:
    """The layout that fits with the fewest keys changed from `given`; of several, the fastest.

    `accumulation` and `schedule` follow from other keys and do not count. Offload is turned on as a last resort.
    """
    least = smallest(given.workload, given.machine, question)
    if least is None or _hopeless(least):
        return None
    before = given.layout._asdict()
    groups: dict[tuple[bool, int], list[Layout]] = {}
    for layout in layouts(given.workload, given.machine, question):
        after = layout._asdict()
        changes = sum(before[key] != after[key] for key in before if key not in ("accumulation", "schedule"))
        groups.setdefault((layout.offload > given.layout.offload, changes), []).append(layout)
    for _, group in sorted(groups.items()):
        predictions = (Prediction(given.workload, layout, given.machine) for layout in group)
        if fitting := [prediction for prediction in predictions if prediction.fits]:
            return min(fitting, key=lambda prediction: prediction.rank)
    return None


def smallest(workload: Workload, machine: Machine, question: Question) -> Prediction | None:
    """The layout that takes the least memory; None if no layout takes the batch."""
    least = (
        _least(workload, machine, question, mesh, offload_choices(machine)[-1])
        for mesh in meshes(workload, machine, question)
    )
    return min(least, key=lambda prediction: (prediction.memory_bytes, prediction.layout), default=None)


def fewest_gpus(workload: Workload, machine: Machine, question: Question) -> int | None:
    """The least number of GPUs, of the question's doubled and doubled again, on which something fits."""
    gpus = question.gpus
    while gpus <= _MOST_GPUS:
        found = smallest(workload, machine, replace(question, gpus=gpus))
        if found is not None and found.fits:
            return gpus
        gpus *= 2
    return None


def _fitting(
    workload: Workload, machine: Machine, question: Question, mesh: Layout, offload: bool
) -> Iterator[Prediction]:
    """The layouts of a mesh that fit and are worth a look; see `search`."""
    if (offload and mesh.data == 1) or _hopeless(_least(workload, machine, question, mesh, offload)):
        return
    stages = [stage for stage in zero_stages(mesh) if stage or not offload]
    too_large: set[tuple[int, int]] = set()  # (ZeRO stage, recompute): too large with larger micro-batches, too
    for micro, accumulation in batches(question, mesh):
        feasible: list[tuple[int, int]] = []
        for saving in product(stages, range(len(RECOMPUTE))):
            if saving in too_large or any(_no_slower(other, saving) for other in feasible):
                continue
            layout = mesh._replace(
                micro_batch_size=micro,
                accumulation=accumulation,
                zero_stage=saving[0],
                offload=offload,
                recompute=RECOMPUTE[saving[1]],
            )
            prediction = Prediction(workload, layout, machine)
            if prediction.fits:
                yield prediction
            elif _hopeless(prediction):
                too_large.add(saving)
            if prediction.verdict == "feasible":
                feasible.append(saving)


def _hopeless(prediction: Prediction) -> bool:
    """Whether larger micro-batches do not fit either: even without the logits, which they may compute in parts."""
    logits = by_part(prediction.memory).get("logits and loss", 0.0)
    return prediction.memory_bytes - logits >= TIGHT * prediction.machine.memory


def _no_slower(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether the first (ZeRO stage, recompute) saves less memory than the other and is at least as fast.

    Stages 0 and 1 are both tried: 1 communicates as much as 0, and its optimizer has less to do.
    """
    return (one[0] == other[0] or 0 < one[0] < other[0]) and one[1] <= other[1]


def _least(workload: Workload, machine: Machine, question: Question, mesh: Layout, offload: bool) -> Prediction:
    """The layout of a mesh that takes the least memory."""
    micro, accumulation = next(batches(question, mesh))
    layout = mesh._replace(
        micro_batch_size=micro,
        accumulation=accumulation,
        zero_stage=zero_stages(mesh)[-1],
        offload=offload and mesh.data > 1,
        recompute=RECOMPUTE[-1],
    )
    return Prediction(workload, layout, machine)
