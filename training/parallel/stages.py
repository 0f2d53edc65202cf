"""Which layers each pipeline stage holds, and how long stages wait for each other; arithmetic without torch."""


def stage_layers(n_layer: int, stages: int) -> list[range]:
    """The layers of each stage, spread evenly; earlier stages get the remainder, because the last one has the head."""
    edges = [-(-n_layer * stage // stages) for stage in range(stages + 1)]
    return [range(edges[stage], edges[stage + 1]) for stage in range(stages)]


def bubble_share(pipeline: int, virtual_stages: int, micro_batches: int) -> float:
    """The share of a step's time that a process waits: (p - 1) / (v m + p - 1), equal for GPipe and 1F1B."""
    return (pipeline - 1) / (virtual_stages * micro_batches + pipeline - 1)
