"""Memory requests of the jobs after training, from the size of the model, without torch.

In MB, measured on a CPU (`/usr/bin/time -f %M`; sequence 1,024, vocabulary 50,257) and requested:

| step | 124M: measured | requested | 355M: measured | requested |
|---|---|---|---|---|
| merge | 473 | 1,082 | 528 | 1,195 |
| evaluate | 6,197 | 7,615 | | 8,830 |
| generate | 1,226 | 2,076 | 2,974 | 4,230 |

At 7B (26.6 GB per copy, sequence 2,048) the requests are 2.6 GB, 59 GB and 62 GB.
"""

from common.settings import ModelSettings

BASE_MB = 700  # Python, torch and their own allocations
SPARE = 1.1  # read and write buffers, relative to the copies of the weights
FLOAT = 4  # bytes
PROOF_TOKENS = 32  # convert.proof: two rows of 16


def _megabytes(model: ModelSettings, copies: int, extra_bytes: float) -> int:
    return BASE_MB + round((SPARE * copies * FLOAT * model.parameters + extra_bytes) / 1e6)


def merge_mb(model: ModelSettings) -> int:
    """The largest tensor, read and written, and logits to compare."""
    largest = FLOAT * model.n_embd * max(model.vocab_size, 4 * model.n_embd)
    return BASE_MB + round((2 * largest + 3 * PROOF_TOKENS * model.vocab_size * FLOAT) * SPARE / 1e6)


def evaluate_mb(model: ModelSettings, batch: int) -> int:
    """Two copies of the weights while loading; then one, and the activations of `batch` windows."""
    windows = batch * model.seq_len * FLOAT * (3.5 * model.vocab_size + 24 * model.n_embd)
    return max(_megabytes(model, 2, 0), _megabytes(model, 1, windows))


def generate_mb(model: ModelSettings) -> int:
    """Two copies of the weights while loading, the KV cache, and the logits of the prompt."""
    cache = 2 * model.n_layer * model.seq_len * model.n_embd * FLOAT
    return _megabytes(model, 2, cache + model.seq_len * model.vocab_size * FLOAT)
