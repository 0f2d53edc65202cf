"""Compute logits directly from a Hugging Face GPT-2 folder's tensors, to prove a conversion.

Written from the published layout and sharing no code with our model, so that a conversion error shows even if reading
and writing make the same mistake. Sources: Radford et al. 2019; Hugging Face's documentation of GPT2LMHeadModel.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from common.errors import CheckpointError
from training.huggingface.config import read_config
from training.huggingface.pretrained import PREFIX
from training.model import GPT2

TOLERANCE = 1e-4  # largest allowed difference relative to the largest logit: float32 sums in another order


@torch.no_grad()
def reference_logits(folder: Path, tokens: Tensor) -> Tensor:
    """(B, T) token ids -> (B, T, V) float32 logits."""
    settings, files = read_config(folder), load_file(folder / "model.safetensors")
    batch, length = tokens.shape
    causal = torch.ones(length, length, dtype=torch.bool).tril()

    def conv1d(x: Tensor, name: str) -> Tensor:
        return torch.matmul(x, files[f"{name}.weight"]).add(files[f"{name}.bias"])  # weight [in, out]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (settings.n_embd,), files[f"{name}.weight"], files[f"{name}.bias"], 1e-5)

    x = files[f"{PREFIX}wte.weight"][tokens] + files[f"{PREFIX}wpe.weight"][:length]
    for layer in range(settings.n_layer):
        block = f"{PREFIX}h.{layer}."
        q, k, v = (
            part.view(batch, length, settings.n_head, -1).transpose(1, 2)  # (B, T, C) -> (B, nh, T, hs)
            for part in conv1d(norm(x, block + "ln_1"), block + "attn.c_attn").chunk(3, dim=-1)
        )
        scores = (q @ k.transpose(2, 3)) / q.shape[-1] ** 0.5
        y = scores.masked_fill(~causal, -torch.inf).softmax(dim=-1) @ v
        x = x + conv1d(y.transpose(1, 2).flatten(2), block + "attn.c_proj")
        hidden = F.gelu(conv1d(norm(x, block + "ln_2"), block + "mlp.c_fc"), approximate="tanh")
        x = x + conv1d(hidden, block + "mlp.c_proj")
    return torch.matmul(norm(x, f"{PREFIX}ln_f"), files[f"{PREFIX}wte.weight"].t())


@torch.no_grad()
def prove(folder: Path, model: GPT2) -> float:
    """The largest difference between the folder's logits and `model`'s, relative to the largest logit.

    Uses two rows of at most 256 fixed pseudo-random tokens. Raises CheckpointError above TOLERANCE.
    """
    length = min(256, model.settings.seq_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.settings.vocab_size, (2, length), generator=generator)
    expected = model.eval()(tokens)
    difference = float((reference_logits(folder, tokens) - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:  # also true for NaN
        raise CheckpointError(
            f"{folder}: logits differ from the checkpoint's by {difference:.2e} of the largest, more than "
            f"{TOLERANCE:.0e}; nothing was written"
        )
    return difference
