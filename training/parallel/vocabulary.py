"""Vocabulary padding: a layout holds more embedding rows than there are tokens.

The model and the checkpoints know the true vocabulary only; padding is added when a layout is built, and no padding row
reaches the loss's softmax (`training.loss`).
"""

from common.settings import ModelSettings


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Vocabulary rows, rounded up so that each tensor-parallel rank holds a multiple of 128 of them."""
    multiple = 128 * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def with_padded_vocabulary(model: ModelSettings, tensor_parallel: int) -> ModelSettings:
    """The settings of a model that carries the padding rows of a layout."""
    return model.model_copy(update={"vocab_size": padded_vocab_size(model.vocab_size, tensor_parallel)})
