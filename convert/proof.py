"""Prove a merge: a fixed batch has equal outputs in the source's files and in the written folder.

Two implementations compute in parallel, layer by layer, in float32. `_source_steps` uses the
source's own arithmetic: each shard multiplies its columns or rows, partial sums are added over the
ranks, and each vocabulary shard gives its logits. `_folder_steps` is written from the published
layout of Hugging Face's GPT-2 and shares no code with the merge. Sources: Shoeybi et al. 2019,
section 3; Radford et al. 2019; the documentation of GPT2LMHeadModel.

Both take a file's rank from its name: `megatron_args.check_ranks` detects exchanged files.

Every attention and MLP output is compared, not only the logits. This names the wrong layer, and it
is sharper: exchanged q and k hardly move the logits of an untrained model.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from common.errors import ProofError
from common.files import read_json
from convert.assemble import prefetch
from convert.sources.source import Architecture, Source

TOLERANCE = 1e-4  # of the logits, relative to the largest: float32 sums in another order
LAYER_TOLERANCE = 1e-3  # of one attention's or MLP's output, relative to its largest: these sums cancel more
_LENGTH = 16  # tokens per row: 32 in all cost a 7B model 0.45 TFLOP, and every row of the embedding is in the logits
_BAND = 1 << 19  # elements of a matrix that are multiplied at a time: they stay in the cache after the conversion

Steps = Iterator[tuple[str, Tensor]]
"""(name, output) of the embedding, of each attention and MLP, and of the head."""
_ACTIVATIONS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}


@dataclass(frozen=True)
class Proof:
    """The result of a comparison that held."""

    tokens: int
    largest_logit: float
    largest_difference: float
    """Of the logits, absolute."""
    relative_difference: float
    """Of the logits, by the largest logit."""
    largest_layer_difference: float
    """Of any layer's attention or MLP output, by the largest value of that output."""
    tolerance: float = TOLERANCE
    layer_tolerance: float = LAYER_TOLERANCE

    def __str__(self) -> str:
        absolute, relative = self.largest_difference, self.relative_difference
        return f"logits equal the source's within {absolute:.1e}, {relative:.1e} of the largest"


@torch.no_grad()
def source_outputs(source: Source, dtype: torch.dtype | None = None) -> list[tuple[str, Tensor]]:
    """The source's outputs, with weights rounded to `dtype`."""
    return list(_source_steps(source, *_batch(source.model), dtype))


def prove(source: Source, expected: Sequence[tuple[str, Tensor]], folder: Path) -> Proof:
    """Compare `source_outputs` with a Hugging Face folder's; ProofError names the first wrong."""
    return _compare(source, iter(expected), _folder_steps(folder, *_batch(source.model)))


def prove_source(source: Source, written: Source) -> Proof:
    """Compare the source with a checkpoint of another layout that was made of it; see `prove`."""
    batch = _batch(source.model)
    return _compare(source, _source_steps(source, *batch, None), _source_steps(written, *batch, None))


@torch.no_grad()
def _compare(source: Source, source_steps: Steps, result_steps: Steps) -> Proof:
    tokens, worst, difference, largest, relative = 0, 0.0, 0.0, 0.0, 0.0
    for (name, expected), (_, result) in zip(source_steps, result_steps, strict=True):
        if not expected.isfinite().all():
            raise ProofError(f"{source.path}: {name} is not finite in the source itself; nothing was written")
        difference, largest = float((result - expected).abs().max()), float(expected.abs().max())
        relative = difference / largest if largest else difference
        limit = TOLERANCE if name == "logits" else LAYER_TOLERANCE
        if not relative <= limit:  # also true for NaN
            raise ProofError(
                f"{source.path}: {name} of the result differs from the source's by {relative:.2e} of the largest, more "
                f"than {limit:.0e}; nothing was written"
            )
        tokens, worst = expected[..., 0].numel(), worst if name == "logits" else max(worst, relative)
    return Proof(tokens, largest, difference, relative, worst)


def _batch(model: Architecture) -> tuple[Tensor, Tensor]:
    """Fixed random tokens, the vocabulary's last one among them, and increasing positions."""
    generator = torch.Generator().manual_seed(0)
    length = min(_LENGTH, model.n_positions)
    tokens = torch.randint(model.vocab_size, (2, length), generator=generator)
    tokens[0, -1] = model.vocab_size - 1
    spread = torch.linspace(0, model.n_positions - 1, length).long()
    random = torch.randperm(model.n_positions, generator=generator)[:length].sort().values
    return tokens, torch.stack([spread, random])


def _source_steps(source: Source, tokens: Tensor, positions: Tensor, dtype: torch.dtype | None) -> Steps:
    """The outputs, computed from the blocks in the files, a band of rows at a time."""
    model, (batch, length) = source.model, tokens.shape

    def exact(tensor: Tensor) -> Tensor:
        return tensor.to(dtype or tensor.dtype).float()

    def vector(name: str) -> Tensor:
        return exact(source.tensors[name].read())

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(
            x, (model.n_embd,), vector(f"{name}.weight"), vector(f"{name}.bias"), model.layer_norm_epsilon
        )

    def embedding(name: str, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, C)."""
        rows = [source.tensors[name].rows(i, i + 1).read() for i in ids.flatten().tolist()]
        return exact(torch.cat(rows)).view(*ids.shape, model.n_embd)

    def product(x: Tensor, name: str, out: int) -> Tensor:
        """Column-parallel blocks give some features; row-parallel blocks partial sums of all."""
        inputs = x.flatten(0, -2).t().contiguous()  # (B, T, in) -> (in, B * T)
        y = torch.zeros(out, inputs.shape[1])
        tensor, conv1d = source.tensors[name], source.conv1d and name.startswith("h.")
        for (row, column), band in (tensor if conv1d else tensor.rows(0, out)).bands(_BAND):  # later rows are padding
            weight, end, last = exact(band), row + band.shape[0], column + band.shape[1]
            if conv1d:
                y[column:last].addmm_(weight.t(), inputs[row:end])
            else:
                y[row:end].addmm_(weight, inputs[column:last])
        return y.t().reshape(*x.shape[:-1], out)

    def linear(x: Tensor, name: str, out: int) -> Tensor:
        return product(x, f"{name}.weight", out) + vector(f"{name}.bias")

    def attention(x: Tensor, name: str) -> Tensor:
        rows = linear(x, f"{name}.c_attn", 3 * model.n_embd).permute(2, 0, 1)  # (3C, B, T), the source's order
        parts = source.qkv.split(rows, model.n_head).reshape(3, model.n_head, -1, batch, length)
        q, k, v = parts.permute(0, 3, 1, 4, 2)  # (3, nh, hs, B, T) -> three of (B, nh, T, hs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return linear(y.transpose(1, 2).flatten(2), f"{name}.c_proj", model.n_embd)

    def mlp(x: Tensor, name: str) -> Tensor:
        hidden = F.gelu(linear(x, f"{name}.c_fc", model.n_inner), approximate=_ACTIVATIONS[model.activation])
        return linear(hidden, f"{name}.c_proj", model.n_embd)

    x = embedding("wte.weight", tokens) + embedding("wpe.weight", positions)
    yield "the embedding", x
    for layer in range(model.n_layer):
        y = attention(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn")
        yield f"the attention of layer {layer}", y
        x = x + y
        y = mlp(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp")
        yield f"the MLP of layer {layer}", y
        x = x + y
    x = norm(x, "ln_f")
    yield "logits", product(x, "wte.weight" if model.tied else "lm_head.weight", model.vocab_size)


def _folder_steps(folder: Path, tokens: Tensor, positions: Tensor) -> Steps:
    """The outputs, computed from the files of a Hugging Face folder, a tensor at a time."""
    config: Any = read_json(folder / "config.json")
    files = _files_of(folder)
    n_embd, n_head = config["n_embd"], config["n_head"]
    batch, length = tokens.shape
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    opened: dict[Path, Any] = {}

    def stored(name: str) -> Any:
        if name not in files:
            raise ProofError(f"model.safetensors.index.json does not name the file of {name!r}; nothing was written")
        path = files[name]
        if path not in opened:
            opened[path] = safe_open(path, framework="pt")
        return opened[path].get_slice(name)

    def read(part: Any, first: int, last: int | None = None) -> Tensor:
        return part[first:last].float()  # type: ignore[no-any-return]

    def bands(name: str, last: int | None = None) -> Iterator[Tensor]:
        """The rows before `last`, prefetched: reading takes as long as multiplying."""
        part = stored(name)
        count, *widths = part.get_shape()
        ends = [*range(0, last or count, max(1, _BAND // math.prod(widths))), last or count]
        return prefetch(lambda rows: read(part, *rows), pairwise(ends), 3)

    def vector(name: str) -> Tensor:
        return read(stored(f"transformer.{name}"), 0)

    def conv1d(x: Tensor, name: str) -> Tensor:
        inputs, bias = x.flatten(0, -2), vector(f"{name}.bias")
        y, start = bias.repeat(len(inputs), 1), 0
        for weight in bands(f"transformer.{name}.weight"):  # [in, out]
            y.addmm_(inputs[:, start : start + len(weight)], weight)
            start += len(weight)
        return y.view(*x.shape[:-1], len(bias))

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = (vector(f"{name}.{kind}") for kind in ("weight", "bias"))
        return F.layer_norm(x, (n_embd,), weight, bias, config["layer_norm_epsilon"])

    def lookup(name: str, ids: Tensor) -> Tensor:
        part = stored(f"transformer.{name}.weight")
        return torch.cat([read(part, i, i + 1) for i in ids.flatten().tolist()]).view(*ids.shape, n_embd)

    x = lookup("wte", tokens) + lookup("wpe", positions)
    yield "the embedding", x
    for layer in range(config["n_layer"]):
        opened.clear()  # mapped pages count as memory
        q, k, v = (
            part.view(batch, length, n_head, -1).transpose(1, 2)  # (B, T, C) -> (B, nh, T, hs)
            for part in conv1d(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn").chunk(3, dim=-1)
        )
        scores = (q @ k.transpose(2, 3)) / q.shape[-1] ** 0.5
        y = scores.masked_fill(~causal, -torch.inf).softmax(dim=-1) @ v
        y = conv1d(y.transpose(1, 2).flatten(2), f"h.{layer}.attn.c_proj")
        yield f"the attention of layer {layer}", y
        x = x + y
        hidden = conv1d(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
        hidden = F.gelu(hidden, approximate=_ACTIVATIONS[config["activation_function"]])
        y = conv1d(hidden, f"h.{layer}.mlp.c_proj")
        yield f"the MLP of layer {layer}", y
        x = x + y
    x = norm(x, "ln_f")
    head, inputs = "transformer.wte.weight" if config["tie_word_embeddings"] else "lm_head.weight", x.flatten(0, 1).t()
    scores = torch.cat([weight @ inputs for weight in bands(head, config["vocab_size"])])
    yield "logits", scores.t().view(batch, length, -1)


def _files_of(folder: Path) -> dict[str, Path]:
    """The file of each tensor, by the index, or the only file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        return {name: folder / file for name, file in read_json(index)["weight_map"].items()}
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)
