"""The contenders of benchmarks.step: transformers, a plain loop in the manner of nanoGPT, and a bare matrix product."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.training_job import Job, Size
from common.workers import available_cpus

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from training.dataset.batches import Batch

MATRIX = 2048  # rows and columns of the product that measures the machine

Steps = Iterator["Tensor | float"]
"""Each `next` runs one optimiser step and returns its loss, which may still be on the device."""


def transformers(job: Job) -> Steps:
    """Hugging Face's model; its loss ignores the last token of a sample."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = job.size.model
    options: dict[str, Any] = {
        **settings.model_dump(include={"n_layer", "n_embd", "n_head"}),
        "n_positions": settings.seq_len,
        "vocab_size": job.size.rows,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), settings.vocab_size - 1),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), settings.dropout),
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    with _device():
        model: Any = GPT2LMHeadModel(GPT2Config(**options)).train()
    model.loss_type = "ForCausalLM"  # its default anyway, but without a warning
    return _plain_loop(job, model, lambda batch: model(input_ids=batch.tokens, labels=batch.tokens).loss)


def nanogpt(job: Job) -> Steps:
    """The plain model below, compiled on a GPU."""
    import torch

    with _device():
        model = plain_gpt2(job.size)
    forward: Any = torch.compile(model) if torch.cuda.is_available() else model
    return _plain_loop(job, model, lambda batch: forward(batch.tokens, batch.targets)[1])


def _device() -> "torch.device":
    """The GPU if there is one; inside `with`, tensors are made there."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def plain_gpt2(size: Size) -> "nn.Module":
    """GPT-2 as written for one device: takes tokens and targets, returns logits and mean loss."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    width, n_head, dropout = size.model.n_embd, size.model.n_head, size.model.dropout

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            batch, tokens, _ = x.shape
            parts = self.qkv(self.ln_1(x)).split(width, dim=2)
            q, k, v = (part.view(batch, tokens, n_head, width // n_head).transpose(1, 2) for part in parts)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
            x = x + F.dropout(self.out(y.transpose(1, 2).contiguous().view(batch, tokens, width)), dropout)
            y = self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))
            out: Tensor = x + F.dropout(y, dropout)
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(size.rows, width), nn.Embedding(size.model.seq_len, width)
            self.h = nn.Sequential(*(Block() for _ in range(size.model.n_layer)))
            self.ln_f = nn.LayerNorm(width)
            self.head = nn.Linear(width, size.rows, bias=False)
            self.head.weight = self.wte.weight

        def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            x = F.dropout(self.wte(tokens) + self.wpe(positions), dropout)
            logits = self.head(self.ln_f(self.h(x)))
            return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    model = Model()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0.0, 0.02)
    return model


def _plain_loop(job: Job, model: "nn.Module", mean_loss: Callable[["Batch"], "Tensor"]) -> Steps:
    """Train with plain PyTorch."""
    import torch

    from training.dataset.batches import BatchForm, read_batch
    from training.run_plan import make_plan

    device = _device()
    torch.set_num_threads(available_cpus())
    data, micro = make_plan(job.settings, "step").data.train, job.size.micro_batch_size
    form = BatchForm(data.end_of_text, pinned=device.type == "cuda")  # copied while the GPU works on the step before
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, fused=True)
    first = 0
    while True:
        batch = read_batch(data, form, range(first, first + micro)).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = mean_loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()
        first += micro


def matrices(_job: Job) -> Steps:
    """Not a training step but a product of large matrices: the speed that no step can exceed."""
    import torch

    torch.set_num_threads(available_cpus())
    left, right = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
    product = torch.empty(MATRIX, MATRIX)
    while True:
        yield torch.mm(left, right, out=product)[0, 0]
