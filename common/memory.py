"""How much memory the steps after a training ask for, from the size of the model; no torch, so that planning is quick.

Peaks measured on a CPU (`/usr/bin/time -f %M`; sequence 1,024, vocabulary 50,257), and what is asked for, in MB:

| step | 124M: measured | asked for | 355M: measured | asked for |
|---|---|---|---|---|
| merge | 1,683 | 2,104 | 3,422 | 4,131 |
| evaluate | 6,197 | 7,615 | | 8,830 |
| generate | 1,226 | 2,076 | 2,974 | 4,230 |

At 7B (26.6 GB a copy, sequence 2,048) that is 60 GB, 59 GB and 62 GB.
"""

from common.settings import ModelSettings

BASE_MB = 700  # Python, torch and what they allocate for themselves
SPARE = 1.1  # buffers of reading and writing, over the copies of the weights
FLOAT = 4  # bytes
PROOF_TOKENS = 512  # convert.proof: two rows of 256
EVALUATED = 8  # training.evaluation.scoring: windows per forward pass


def parameters(model: ModelSettings) -> int:
    """Parameters of a GPT-2 with tied embeddings, its true vocabulary, no padding."""
    width = model.n_embd
    block = 12 * width**2 + 13 * width  # qkv 3, projection 1, MLP 4 + 4; biases and two LayerNorms
    return model.n_layer * block + 2 * width + (model.vocab_size + model.seq_len) * width


def _megabytes(model: ModelSettings, copies: int, more: float) -> int:
    return BASE_MB + round((SPARE * copies * FLOAT * parameters(model) + more) / 1e6)


def merge_mb(model: ModelSettings) -> int:
    """Two copies of the weights (the checkpoint's and the written folder's), and three sets of logits to compare."""
    return _megabytes(model, 2, 3 * PROOF_TOKENS * model.vocab_size * FLOAT)


def evaluate_mb(model: ModelSettings) -> int:
    """Two copies while the file is read; then one, and for 8 windows logits, softmax and activations."""
    windows = EVALUATED * model.seq_len * FLOAT * (3.5 * model.vocab_size + 24 * model.n_embd)
    return max(_megabytes(model, 2, 0), _megabytes(model, 1, windows))


def generate_mb(model: ModelSettings) -> int:
    """Two copies while the file is read, keys and values of a full context, and the logits of a prompt."""
    cache = 2 * model.n_layer * model.seq_len * model.n_embd * FLOAT
    return _megabytes(model, 2, cache + model.seq_len * model.vocab_size * FLOAT)
