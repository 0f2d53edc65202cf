"""How a layout divides a model: layers, padded vocabulary, parts of the loss. Needs no torch."""

from common.settings import ModelSettings

CHUNKS = 8  # parts of a chunked loss: an eighth of the logits, and products that are still large
EAGER_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Logits per float32 copy of the eager loss, by device: fits a CPU's cache, keeps a GPU busy."""


def stage_layers(n_layer: int, stages: int) -> list[range]:
    """The layers of each stage, spread evenly; the last one, with the head, gets no remainder."""
    edges = [-(-n_layer * stage // stages) for stage in range(stages + 1)]
    return [range(edges[stage], edges[stage + 1]) for stage in range(stages)]


def bubble_share(pipeline: int, virtual_stages: int, micro_batches: int) -> float:
    """The share of a step that a rank waits: (p - 1) / (v m + p - 1), for GPipe and 1F1B alike."""
    return (pipeline - 1) / (virtual_stages * micro_batches + pipeline - 1)


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Vocabulary rows, rounded up to a multiple of 128 per tensor-parallel rank.

    Checkpoints have the true rows only, and no padding row reaches the softmax (`training.loss`).
    """
    multiple = 128 * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def with_padded_vocabulary(model: ModelSettings, tensor_parallel: int) -> ModelSettings:
    """The settings of a model that carries the padding rows of a layout."""
    return model.model_copy(update={"vocab_size": padded_vocab_size(model.vocab_size, tensor_parallel)})


def loss_parts(loss: str, logits: int, memory: int | None) -> int:
    """The number of parts in which `train.loss` is computed.

    `logits` and `memory`: bytes of all logits and of the GPU; None on a CPU.
    """
    if loss == "auto":
        loss = "chunked" if memory is not None and 2 * logits > memory / 4 else "whole"
    return CHUNKS if loss == "chunked" else 1
