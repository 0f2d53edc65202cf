"""Merging a checkpoint against a plain copy of the result: time, and peak memory against the bound.

Two synthetic checkpoints: Megatron-LM's (checkpoint_version 3, float16, tensor 8), and one of ours (float32, with both
moments). At 7b, ours has 8 of the 32 layers: with all of them it and its copies would need 130 GB. The copy is
shutil.copyfile of the merged folder's files, and fsync. `written` is convert.targets.huggingface.write_folder: reading,
reordering, transposing, hashing and writing all tensors, and fsync. `convert.merge_mp` is the whole command, which also
hashes the source (ours: compares it with its manifest), compares replicas, and computes the proof. Actions take turns,
each in its own process, and read from the disk, not from the page cache. Times are medians, and a ratio is the median
over the rounds, each against the copy of the same round. The bound of the memory is twice the largest tensor + 1 GiB.
"""

import argparse
import os
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.machine import alone, peak_memory, table
from benchmarks.training_job import Job, Size, write_dataset
from common.cli import output_folder, positive_int
from common.files import fsync
from common.settings import ModelSettings

_RANKS = 8
_VOCABULARY_STEP = 128  # Megatron's make_vocab_size_divisible_by


class Shape(NamedTuple):
    """The models to merge."""

    model: ModelSettings
    our_layers: int
    """Of our checkpoint."""


_SIZES = {
    "tiny": Shape(ModelSettings(n_layer=2, n_head=8, n_embd=64, seq_len=32), 2),
    "345m": Shape(ModelSettings(n_layer=24, n_head=16, n_embd=1024), 24),
    "7b": Shape(ModelSettings(n_layer=32, n_head=32, n_embd=4096, seq_len=2048), 8),
}


@dataclass(frozen=True)
class Measured:
    """One action of one round."""

    seconds: float
    size: int
    """Bytes of the weights that were written."""
    memory: int
    """Peak, in bytes."""
    bound: int = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--size", choices=_SIZES, default="345m", help="size of the model (default 345m)")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="rounds per row (default 3)")
    parser.add_argument(
        "--folder", type=output_folder, metavar="DIR", help="where to write, 45 GB at 7b (default: a temporary folder)"
    )


def make_megatron(folder: Path, model: ModelSettings) -> None:
    """Write iter_0000001/mp_rank_TT/model_optim_rng.pt; all layers have the same random values, but no two ranks."""
    import torch
    from torch import Tensor

    rows = -(-model.vocab_size // (_VOCABULARY_STEP * _RANKS)) * _VOCABULARY_STEP  # of one rank
    C, inner = model.n_embd, 4 * model.n_embd // _RANKS
    generator = torch.Generator().manual_seed(0)
    size = max(rows * C, model.seq_len * C, 4 * C * C // _RANKS) + _RANKS
    pool = torch.empty(size).normal_(0, 0.02, generator=generator).half()

    def values(*shape: int, first: int = 0) -> Tensor:
        return pool[first : first + torch.Size(shape).numel()].view(shape).clone()

    def layers(rank: int) -> Iterator[tuple[str, Tensor]]:
        for layer in range(model.n_layer):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"layers.{layer}.{norm}.weight", torch.ones(C).half()
                yield f"layers.{layer}.{norm}.bias", values(C)
            for name, (out, into) in {
                "self_attention.query_key_value": (3 * C // _RANKS, C),
                "self_attention.dense": (C, C // _RANKS),
                "mlp.dense_h_to_4h": (inner, C),
                "mlp.dense_4h_to_h": (C, inner),
            }.items():
                yield f"layers.{layer}.{name}.weight", values(out, into, first=rank)
                yield f"layers.{layer}.{name}.bias", values(out)
        yield "final_layernorm.weight", torch.ones(C).half()
        yield "final_layernorm.bias", values(C)

    args = Namespace(
        num_layers=model.n_layer,
        hidden_size=C,
        num_attention_heads=model.n_head,
        max_position_embeddings=model.seq_len,
        padded_vocab_size=rows * _RANKS,
        tensor_model_parallel_size=_RANKS,
        pipeline_model_parallel_size=1,
        bias_gelu_fusion=True,
    )
    for rank in range(_RANKS):
        embedding = {
            "word_embeddings": {"weight": values(rows, C)},
            "position_embeddings": {"weight": values(model.seq_len, C)},
        }
        content = {"language_model": {"embedding": embedding, "encoder": dict(layers(rank))}}
        path = folder / "iter_0000001" / f"mp_rank_{rank:02}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": content}, path)
        fsync(path)


def make_ours(folder: Path, model: ModelSettings) -> None:
    """Write iter_0000001 of this toolkit: float32, with moments; values as in `make_megatron`."""
    from convert.sources.find import open_source
    from convert.targets import ours
    from training.run_plan import make_plan

    make_megatron(folder / "megatron", model)
    job = Job(folder, Size(model, 1, 1))
    write_dataset(job)
    ours.write(open_source(folder / "megatron" / "iter_0000001"), folder, make_plan(job.settings, "step"))
    shutil.rmtree(folder / "megatron")


def write(checkpoint: Path, output: Path) -> Measured:
    """Read and write all tensors, without hashes of the source, comparison and proof."""
    import math

    from convert.sources.find import open_source
    from convert.targets.huggingface import write_folder

    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        source = open_source(checkpoint)
        started = time.perf_counter()
        output.mkdir()
        files = write_folder(output, source)
    taken = time.perf_counter() - started
    kinds = {block.tensor.dtype.itemsize for tensor in source.tensors.values() for block in tensor.blocks}
    largest = max(math.prod(tensor.shape) for tensor in source.tensors.values()) * max(kinds)
    return Measured(taken, sum(entry["size"] for entry in files.values()), peak_memory(), 2 * largest + 2**30)


def merge(checkpoint: Path, output: Path) -> Measured:
    """The whole command, once PyTorch is imported."""
    import convert.proof
    import convert.sources.megatron
    import convert.sources.ours
    import convert.targets.huggingface  # noqa: F401
    from convert import merge_mp

    started = time.perf_counter()
    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        merge_mp.merge(checkpoint, output)
    return Measured(time.perf_counter() - started, 0, peak_memory())


def copy(folder: Path, output: Path) -> Measured:
    """Copy the files of a folder, one after the other."""
    started = time.perf_counter()
    output.mkdir()
    for path in sorted(folder.iterdir()):
        shutil.copyfile(path, output / path.name)
        fsync(output / path.name)
    return Measured(time.perf_counter() - started, 0, peak_memory())


def forget(folder: Path) -> None:
    """Remove a folder's files from the page cache."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare(label: str, checkpoint: Path, rounds: int) -> list[dict[str, str]]:
    """The rows of one checkpoint."""
    merged, target = checkpoint.with_name("merged"), checkpoint.with_name("target")
    found: dict[str, list[Measured]] = {"copy of the result": [], "written": [], "convert.merge_mp": []}
    for _ in range(rounds):
        for name, action, source, output in (
            ("convert.merge_mp", merge, checkpoint, merged),
            ("copy of the result", copy, merged, target),
            ("written", write, checkpoint, target),
        ):
            shutil.rmtree(output, ignore_errors=True)
            os.sync()  # what an earlier action left must not slow this one
            forget(source)  # nor help it: every action reads its input from the disk
            found[name].append(alone(action, source, output))
    for folder in (merged, target):
        shutil.rmtree(folder)
    size, bound = found["written"][0].size, found["written"][0].bound
    copies = [one.seconds for one in found["copy of the result"]]
    return [
        {
            "merging": f"{label}: {name}",
            "GB": f"{size / 1e9:.2f}",
            "s": f"{median(one.seconds for one in measured):.1f}",
            "GB/s": f"{size / 1e9 / median(one.seconds for one in measured):.2f}",
            "ratio": f"{median(base / one.seconds for base, one in zip(copies, measured, strict=True)):.2f}",
            "peak memory, MB": f"{max(one.memory for one in measured) / 1e6:,.0f}",
            "bound, MB": "" if name.startswith("copy") else f"{bound / 1e6:,.0f}",
        }
        for name, measured in found.items()
    ]


def measure(arguments: argparse.Namespace) -> str:
    """The table."""
    shape, rows = _SIZES[arguments.size], []
    ours = shape.model.model_copy(update={"n_layer": shape.our_layers})
    part = f", {shape.our_layers} layers" if shape.our_layers != shape.model.n_layer else ""
    for label, make, model in (
        (f"Megatron-LM, tensor {_RANKS}", make_megatron, shape.model),
        (f"ours{part}", make_ours, ours),
    ):
        with TemporaryDirectory(dir=arguments.folder) as name:
            alone(make, Path(name), model)
            rows += compare(label, Path(name) / "iter_0000001", arguments.rounds)
    return table(rows)
