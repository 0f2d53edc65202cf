"""A GPT of PyTorch's own layers, whose weights lie as nanoGPT's and llm.c's: the truth for both."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from training.inference.load import load_model

LAYER = {
    "ln_1": "norm1.",
    "attn.c_attn": "self_attn.in_proj_",
    "attn.c_proj": "self_attn.out_proj.",
    "ln_2": "norm2.",
    "mlp.c_fc": "linear1.",
    "mlp.c_proj": "linear2.",
}
"""PyTorch's names for those of GPT-2, in its order."""


class Gpt(nn.Module):
    """Pre-norm layers of 16 channels and 4 heads, learned positions, a tied head; every weight is random."""

    def __init__(self, rows: int, gelu: Callable[[Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(rows, 16), nn.Embedding(12, 16)
        self.h = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 64, 0.0, gelu, batch_first=True, norm_first=True, bias=bias)
            for _ in range(3)
        )
        self.ln_f = nn.LayerNorm(16, bias=bias)
        generator = torch.Generator().manual_seed(6)
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.5, generator=generator)

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, V)."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.h:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.ln_f(x) @ self.wte.weight.T
        return logits

    def weights(self) -> dict[str, Tensor]:
        """The weights by GPT-2's names."""
        found = {}
        for theirs, tensor in self.state_dict().items():
            name = theirs
            for ours, pytorch in LAYER.items():
                name = name.replace(f".{pytorch}", f".{ours}.")
            found[name] = tensor
        return found


def assert_same_logits(folder: Path, truth: Gpt, vocabulary: int) -> None:
    """transformers and we compute the truth's logits from a folder."""
    tokens = torch.randint(vocabulary, (2, 12), generator=torch.Generator().manual_seed(4))
    expected = truth(tokens)[..., :vocabulary]
    with torch.no_grad():
        theirs = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits
    for found in (theirs, load_model(folder)[0](tokens).cpu()):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
