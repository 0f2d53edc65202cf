"""The memory that the loss takes for the logits, whole or in parts; arithmetic without torch."""

CHUNKS = 8  # parts of a chunked loss: an eighth of the logits, and products that are still large


def peak_bytes(tokens: int, width: int, rows: int, element: int, chunks: int, compiled: bool) -> int:
    """Bytes that the loss of a micro-batch holds at its peak, beside `x` and the weight.

    `rows` of the vocabulary are local; `element` is the size of a number in the type of the products. Whole: the
    logits, and compiled their gradient, too. In parts: the logits of one part, and the gradients of the weight, in
    float32 and as the product gives it, and of `x`.
    """
    logits = tokens * rows * element
    if chunks == 1:
        return 2 * logits if compiled else logits
    return logits // chunks + rows * width * (4 + element * (element < 4)) + tokens * width * element


def loss_parts(loss: str, logits: int, memory: int | None) -> int:
    """The number of parts in which `train.loss` is computed, with logits of so many bytes.

    `memory` is the GPU's, in bytes; None on a CPU.
    """
    if loss == "auto":
        loss = "chunked" if memory is not None and 2 * logits > memory / 4 else "whole"
    return CHUNKS if loss == "chunked" else 1
