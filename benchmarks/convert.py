"""Merging a checkpoint against a plain copy of the result: time, and peak memory against the bound.

Two synthetic checkpoints, made by this toolkit's own commands: Megatron-LM's (float16, tensor 8), and one of ours
(float32, with both moments). At 7b, ours has 8 of the 32 layers: with all of them it and its copies would need 130 GB.
The copy is shutil.copyfile of the merged folder's files, and fsync. `written` reads, reorders, transposes, hashes and
writes all tensors, and waits for the disk. `convert.merge_mp` is the whole command, which also hashes the source (ours:
compares it with its manifest), compares replicas, and computes the proof. Each action has its own process, and reads
from the disk, not from the page cache. The bound of the memory is twice the largest tensor + 1 GiB.
"""

import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

from benchmarks.checkpoint import copy_files
from benchmarks.harness import Contender, Row, Timed, compare, run_command
from benchmarks.step import Job, Size, write_dataset
from common.files import write_json
from common.settings import ModelSettings

_MODELS = {
    "tiny": (ModelSettings(n_layer=2, n_head=8, n_embd=64, seq_len=32), 2),
    "345m": (ModelSettings(n_layer=24, n_head=16, n_embd=1024), 24),
    "7b": (ModelSettings(n_layer=32, n_head=32, n_embd=4096, seq_len=2048), 8),
}
"""The model by size, and the layers of our checkpoint."""


def make_source(folder: Path, model: ModelSettings) -> Path:
    """Write a Hugging Face folder with random float16 weights."""
    import torch

    from training.checkpoint.files import write_file
    from training.huggingface.config import CONFIG, WEIGHTS, make_config
    from training.tensors import Sizes, all_names, hugging_face_name, leaf_of

    sizes = Sizes(model.n_embd, 4 * model.n_embd, model.seq_len, model.vocab_size)
    shapes = {hugging_face_name(name): leaf_of(name).shape(sizes, conv1d=True) for name in all_names(model.n_layer)}
    folder.mkdir(parents=True)
    tensors = (0.02 * torch.randn(shape).half() for shape in shapes.values())
    write_file(folder / WEIGHTS, {name: (torch.float16, shape) for name, shape in shapes.items()}, tensors)
    shape = model.model_dump(include={"n_layer", "n_head", "n_embd", "vocab_size"})
    write_json(folder / CONFIG, make_config(**shape, n_positions=model.seq_len, n_inner=4 * model.n_embd))
    return folder


def make_megatron(folder: Path, model: ModelSettings) -> Path:
    """A checkpoint of Megatron-LM, checkpoint_version 3, tensor 8."""
    source = make_source(folder / "source", model)
    words = ("--checkpoint", source, "--output", folder / "megatron", "--tp", 8, "--format", "v3")
    run_command("convert.to_megatron", *words)
    shutil.rmtree(source)
    return folder / "megatron"


def make_ours(folder: Path, model: ModelSettings) -> Path:
    """A checkpoint of this toolkit."""
    source, config, job = make_source(folder / "source", model), folder / "config.yaml", Job(folder, Size(model, 1, 1))
    write_dataset(job)
    write_json(config, job.settings.model_dump(mode="json", exclude_unset=True))  # JSON is YAML
    run_command("convert.from_megatron", "--checkpoint", source, "--config", config, "--model", "step")
    shutil.rmtree(source)
    return folder / "models" / "step"


def merging(checkpoint: Path, output: Path) -> Timed:
    """The whole command, once PyTorch is imported."""
    import convert.proof
    import convert.sources.megatron
    import convert.sources.ours
    import convert.targets.huggingface  # noqa: F401
    from convert import merge_mp

    return partial(_silently, partial(merge_mp.merge, checkpoint, output))


def writing(checkpoint: Path, output: Path) -> Timed:
    """Read and write all tensors, without hashes of the source, comparison and proof."""
    from convert.sources.find import open_source
    from convert.targets.huggingface import write_folder

    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        source = open_source(checkpoint)  # which compares ours with its manifest

    def write() -> None:
        output.mkdir()
        write_folder(output, source)

    return partial(_silently, write)


def _silently(run: Timed) -> None:
    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        run()


def copying(source: Path, target: Path) -> Timed:
    """Copy the files of a folder, one after the other."""
    return lambda: copy_files(source, target)


def measure(arguments: Namespace) -> Iterator[Row]:
    """Merging Megatron-LM's and our checkpoints beside a copy of the result."""
    model, layers = _MODELS[arguments.size]
    fewer = model.model_copy(update={"n_layer": layers})
    part = f", {layers} layers" if fewer != model else ""
    for label, make, shape, width in (
        ("Megatron-LM, tensor 8", make_megatron, model, 2),
        (f"ours{part}", make_ours, fewer, 4),
    ):
        work = arguments.work / label
        checkpoint, merged, target = make(work, shape), work / "merged", work / "target"
        merging(checkpoint, merged)()  # what is copied
        contenders = [
            Contender(f"{label}: copy of the result", copying, (merged, target)),
            Contender(f"{label}: written", writing, (checkpoint, target), bar=0.83),
            Contender(f"{label}: convert.merge_mp", merging, (checkpoint, target), bar=0.3),
        ]

        def clear(_label: str, work: Path = work) -> None:
            shutil.rmtree(work / "target", ignore_errors=True)
            os.sync()  # what an earlier action left must not slow this one
            for path in (path for path in work.rglob("*") if path.is_file()):  # nor help it
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        largest = width * shape.n_embd * max(shape.vocab_size, 4 * shape.n_embd)
        parameters = shape.n_embd * (shape.vocab_size + shape.seq_len) + shape.n_layer * shape.layer_parameters
        rows = compare("merging", contenders, arguments.rounds, width * parameters / 1e9, "GB", before=clear)
        yield from ({**row, "bound MB": (2 * largest + 2**30) / 1e6} for row in rows)
        shutil.rmtree(work)
