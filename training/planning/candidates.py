"""The layouts that the trainer accepts for a model, a number of GPUs and a batch size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from common.settings import ParallelSettings
from training.planning.layout import Layout
from training.planning.machines import Machine
from training.planning.workload import Workload

RECOMPUTE = ("none", "selective", "full")
"""From the fastest to the one that needs the least memory."""
_MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
_LARGEST_MICRO_BATCH = 128  # matrix products are as fast as they get well before that


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


def layouts(workload: Workload, machine: Machine, question: Question) -> Iterator[Layout]:
    """Every layout that the trainer accepts for a question, whether it fits or not."""
    for mesh in meshes(workload, machine, question):
        for micro, accumulation in batches(question, mesh):
            for offload, zero, recompute in product(offload_choices(machine), zero_stages(mesh), RECOMPUTE):
                if zero or not offload:
                    yield mesh._replace(
                        zero_stage=zero,
                        offload=offload,
                        micro_batch_size=micro,
                        accumulation=accumulation,
                        recompute=recompute,
                    )


def meshes(workload: Workload, machine: Machine, question: Question) -> Iterator[Layout]:
    """Ways to spread the model over the GPUs for which some micro-batch works; without ZeRO and recompute."""
    model, gpus = workload.model, question.gpus
    node = min(gpus, machine.per_node)
    for tensor, pipeline in product(_divisors(model.n_head), _divisors(gpus)):
        if gpus % (tensor * pipeline) or node % tensor or pipeline > model.n_layer:
            continue
        for virtual in _virtual_stages(model.n_layer, pipeline):
            mesh = Layout(
                tensor=tensor,
                sequence_parallel=tensor > 1 and model.seq_len % tensor == 0,  # it only saves
                pipeline=pipeline,
                schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
                virtual_stages=virtual,
                data=gpus // (tensor * pipeline),
            )
            if any(batches(question, mesh)):
                yield mesh


def batches(question: Question, mesh: Layout) -> Iterator[tuple[int, int]]:
    """(micro_batch_size, accumulation) that the schedule takes, from the smallest micro-batch."""
    per_rank, rest = divmod(question.global_batch_size, mesh.data)
    if not question.at_most and rest:
        return
    takes = _takes(mesh)
    for micro in [question.micro_batch_size] if question.micro_batch_size else _micro_batches(question, per_rank):
        accumulation, rest = divmod(per_rank, micro)
        while question.at_most and accumulation > 1 and not takes(accumulation):
            accumulation -= 1
        if accumulation and takes(accumulation) and (question.at_most or not rest):
            yield micro, accumulation


def _micro_batches(question: Question, per_rank: int) -> list[int]:
    """Micro-batches to try for so many samples per data-parallel rank."""
    if question.at_most:
        return [micro for micro in _MICRO_BATCHES if micro <= per_rank]
    return [micro for micro in range(1, min(per_rank, _LARGEST_MICRO_BATCH) + 1) if per_rank % micro == 0]


def _takes(mesh: Layout) -> Callable[[int], bool]:
    """Whether the schedule runs a number of micro-batches."""
    return ParallelSettings.model_validate(mesh.keys()["parallel"]).takes


def zero_stages(mesh: Layout) -> tuple[int, ...]:
    """The stages that differ in a mesh: a pipeline makes 2 the same as 1."""
    if mesh.data == 1:
        return (0,)
    return (0, 1, 3) if mesh.pipeline > 1 else (0, 1, 2, 3)


def offload_choices(machine: Machine) -> tuple[bool, ...]:
    """Whether offload may be off or on: a CPU has nowhere to move anything."""
    return (False, True) if machine.device == "cuda" else (False,)


def _virtual_stages(n_layer: int, pipeline: int) -> list[int]:
    """Numbers of stages per rank that split the layers evenly; 1 always."""
    if pipeline == 1:
        return [1]
    return [1, *(number for number in (2, 3, 4, 6, 8) if n_layer % (pipeline * number) == 0)]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
