"""Quick checks on a GPU: does everything work at all? Times are not accurate.

`device` and `build` come first, then all others at once. The main job is a user's: tokens, a
training that is killed, resumed and compared bit for bit with an undisturbed one, a merged model,
text.
"""

import json
import lzma
import os
import shutil
import subprocess
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.items import ROOT, Context, Item, finish, seconds, start
from benchmarks.harness import Row
from benchmarks.step import SIZES
from common.errors import ToolkitError
from common.files import read_json, read_rows, write_json

if TYPE_CHECKING:
    from common.settings import Experiment
    from training.launch.process_group import World


def device(context: Context) -> Iterator[Row]:
    """The programs of the machine; 1 GiB of GPU memory, and pinned memory on the host."""
    import torch

    for words in (["nvidia-smi"], ["nvcc", "--version"], ["g++", "--version"], ["compute-sanitizer", "--version"]):
        text = subprocess.run(words, capture_output=True, text=True).stdout if shutil.which(words[0]) else "not found"
        print(f"{words[0]}: {text}", flush=True)
        lines = [line for line in text.splitlines() if line.strip()]
        wanted = [line for line in lines if "release" in line or "Driver Version" in line]
        yield {"device": words[0], "found": " ".join([*wanted, *lines][:1]).strip(" |").replace("|", "/")}
    size = 2**20 if context.toy else 2**30
    on_device = torch.ones(size, dtype=torch.uint8, device=context.device)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=context.gpu)
    taken = seconds(lambda: pinned.copy_(on_device, non_blocking=True), context.device)
    if int(pinned[-1]) != 1:
        raise ToolkitError("a copy from the device to pinned memory is wrong")
    yield {"device": "memory", "found": os.environ["PYTORCH_CUDA_ALLOC_CONF"]}
    yield {"device": "to pinned memory", "found": f"{size / taken / 1e9:.1f} GB/s, the first time"}
    yield {"device": "disk", "found": f"{shutil.disk_usage(context.folder).free / 1e9:.0f} GB free"}


def build(context: Context) -> Iterator[Row]:
    """The kernels, compiled for this GPU; without one, for an H100."""
    from training.kernels.build import build, nvcc
    from training.kernels.library import capability

    begun = time.monotonic()
    path = build(nvcc(capability() if context.gpu else 90))
    yield {"library": path.name, "s": time.monotonic() - begun}


def check(context: Context) -> Iterator[Row]:
    """The results of each kernel against PyTorch's; a line for each in the log."""
    finish(start("training.kernels", "check"))
    yield {"kernels": "as PyTorch"}


def sanitizer(context: Context) -> Iterator[Row]:
    """The same under compute-sanitizer, which detects accesses outside of tensors."""
    path = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(path).exists():
        yield {"compute-sanitizer": "not found"}
        return
    # PyTorch probes the driver for features, which is no error; its memory pool would hide wrong
    # accesses
    words = [path, "--report-api-errors", "no", "--print-limit", "20", "--error-exitcode", "9"]
    finish(start("training.kernels", "check", under=words, PYTORCH_NO_CUDA_MEMORY_CACHING="1"))
    yield {"compute-sanitizer": "no errors"}


class Several(int):
    """One rank that is treated as several: with collectives, sharding, gathering."""

    def __gt__(self, other: object) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    **{f"ZeRO {stage}": {"data": Several(1), "zero_stage": stage} for stage in range(4)},
    "ZeRO 3, offloaded": {"data": Several(1), "zero_stage": 3, "offload": True},
    "tensor": {"tensor": Several(1)},
    "tensor, sequence": {"tensor": Several(1), "sequence_parallel": True},
    "pipeline": {"pipeline": Several(1)},
    "all, ZeRO 2": {
        **dict.fromkeys(("tensor", "data", "pipeline"), Several(1)), "zero_stage": 2, "sequence_parallel": True,
    },
}  # fmt: skip
_SPLIT = ("ZeRO 0", "ZeRO 3", "tensor, sequence", "all, ZeRO 2")
_TRAININGS: tuple[tuple[dict[str, Any], Iterable[str]], ...] = (
    ({"compile": "none"}, LAYOUTS),
    ({"compile": "blocks"}, _SPLIT),
    ({"compile": "none", "optimizer": "muon"}, ("one process", *_SPLIT, "ZeRO 3, offloaded")),
    ({"compile": "blocks", "reset_attention_mask": True}, ("one process", "all, ZeRO 2")),
)
"""Keys of `train`, and layouts whose losses must equal those of the last `one process`."""
_STEPS = 4


def mesh(context: Context) -> Iterator[Row]:
    """Each layout on a mesh of one rank (NCCL on a GPU): losses must equal those of one process."""
    import torch
    import torch.distributed as dist

    from common.settings import Experiment, ParallelSettings
    from training.launch.process_group import World

    target = torch.device("cuda", torch.cuda.current_device()) if context.gpu else context.device
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    backends = {"backend": "cpu:gloo,cuda:nccl", "device_id": target} if context.gpu else {"backend": "gloo"}
    dist.init_process_group(**backends, **alone)
    model = {"n_layer": 4, "n_head": 4, "n_embd": 256, "seq_len": 256, "vocab_size": 1000, "dropout": 0}
    model |= {"n_layer": 2, "n_embd": 32, "seq_len": 16, "vocab_size": 20} if context.toy else {}
    train = {"iterations": _STEPS, "micro_batch_size": 2, "accumulation": 2, "lr": 1e-3}
    plain = Experiment.model_validate({"model": model, "train": train})
    expected, wrong = list[float](), list[str]()
    for keys, name in [(keys, name) for keys, names in _TRAININGS for name in names]:
        if LAYOUTS[name].get("offload") and not context.gpu:
            continue
        parallel = ParallelSettings().model_copy(update=LAYOUTS[name])
        kept = {"parallel": parallel, "train": plain.train.model_copy(update=keys)}
        losses, fault = list[float](), ""
        try:
            losses = _losses(plain.model_copy(update=kept), World(0, 1, target), context.folder)
            expected = losses if name == "one process" else expected
            furthest = max(abs(loss - other) for loss, other in zip(losses, expected, strict=True))
            if not furthest < (0.02 if context.gpu else 1e-4):  # other orders of sums, in bfloat16 on a GPU
                fault = f"no, differs by {furthest:.2g}"
        except Exception as error:  # the next layout may work
            traceback.print_exc()
            fault = f"{type(error).__name__}: {error}".splitlines()[0]
        wrong += [name] * bool(fault)
        yield {
            "layout": name,
            "train": ", ".join(value if isinstance(value, str) else key for key, value in keys.items()),
            "loss": losses[-1] if losses else None,
            "as one process": fault or "yes",
        }
    if wrong:
        raise ToolkitError(f"no losses, or others than one process: {', '.join(wrong)}")


def _losses(experiment: "Experiment", world: "World", folder: Path) -> list[float]:
    """Losses of the first steps, on random tokens."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from training.operations import choose_operations
    from training.session import open_session
    from training.step import step_batches, train_step
    from training.trial import RandomTokens

    torch._dynamo.reset()
    choose_operations(experiment, world, folder)
    spread = any(isinstance(size, Several) for _, size in experiment.parallel)
    axes = init_device_mesh(world.device.type, (1, 1, 1), mesh_dim_names=("pp", "dp", "tp")) if spread else None
    session = open_session(experiment, world, axes)
    tokens = RandomTokens(experiment.model.seq_len, experiment.model.vocab_size)
    with closing(step_batches(session, tokens, 0)) as batches:
        return [train_step(session, number, next(batches), 1e-3).loss for number in range(1, _STEPS + 1)]


def write_run(folder: Path, context: Context, train: dict[str, Any]) -> tuple[Path, Path]:
    """A run of 124M on the tests' English text; returns its configuration and model folder."""
    import numpy as np

    from common.tokenizer import Tokenizer
    from common.vocabulary import vocabulary_files
    from corpus.index import IndexWriter, Meta

    text = lzma.decompress((ROOT / "tests/training/english.txt.xz").read_bytes()).decode()
    tokenizer = Tokenizer(vocabulary_files())
    (folder / "dataset").mkdir(parents=True)
    meta = Meta(tokenizer.vocab_size, tokenizer.end_of_text)
    with IndexWriter(folder / "dataset/corpus_text_document", np.uint16, meta) as writer:
        for first in range(0, len(text), 4000):
            tokens = [*tokenizer.encode(text[first : first + 4000]), tokenizer.end_of_text]
            writer.add_document(np.array(tokens, np.uint16))
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "seq_len": 32, "dropout": 0.1}
    if not context.toy:
        size = SIZES["124m"].model.model_dump(exclude={"vocab_size"}) | {"dropout": 0.1}
    batch = {"micro_batch_size": 2 if context.toy else 8, "accumulation": 2, "lr": 0.03 if context.toy else 1e-3}
    model = {"model": size, "train": {**batch, "log_interval": 1, "split": "95,5,0", **train}}
    write_json(folder / "config.yaml", {"run": str(folder), "urls": ["-"], "models": {"gpt2": model}})
    return folder / "config.yaml", folder / "models/gpt2"


def main_job(context: Context) -> Iterator[Row]:
    """Train, kill, resume, compare with an undisturbed training; merge with proof; generate."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"  # two trainings and the other checks at once
    half = 10
    train = {"iterations": 2 * half, "save_interval": half, "deterministic": True}
    config, model = write_run(context.folder / "job/killed", context, train)
    shutil.copytree(config.parent, context.folder / "job/straight")
    command = ("training.train", "--config", config, "--model", "gpt2")
    straight = start(*command, f"run={context.folder / 'job/straight'}")
    process, first = start(*command), model / f"iter_{half:07d}"
    while process.poll() is None and not first.exists():
        time.sleep(0.005)
    process.kill()
    if process.wait() >= 0:
        finish(process)
        raise ToolkitError(f"the training was to be killed after its checkpoint of iteration {half}; it ended before")
    yield {"main job": "killed", "found": f"after {len(read_rows(model / 'train.csv'))} of {2 * half} iterations"}
    resumed = start(*command)
    finish(straight)
    finish(resumed)
    other = context.folder / "job/straight/models/gpt2"
    yield {"main job": "resumed", "found": f"loss {_curve(model)[0]:.3f} to {_curve(model)[-1]:.3f}"}
    if _curve(model)[-1] > _curve(model)[0] - 0.5:
        raise ToolkitError("the loss did not fall by half a nat")
    last = f"iter_{2 * half:07d}"
    if (differ := _differing(model / last, other / last)) or _curve(model) != _curve(other):
        raise ToolkitError(f"other bits than an undisturbed training: {differ[:9]}, {_curve(model)}, {_curve(other)}")
    yield {"main job": "bits", "found": "weights, moments and losses equal those of an undisturbed training"}
    merged = context.folder / "job/merged"
    finish(start("convert.merge_mp", "--checkpoint", model, "--output", merged))
    proof = read_json(merged / "merge_report.json")["proof"]
    found = f"logits up to {proof['largest_logit']:.3g} differ by {proof['largest_difference']:.2g}"
    yield {"main job": "merged", "found": found}
    output = merged.with_name("text.jsonl")
    words = ("--prompt", "The first of them", "--max-tokens", 24, "--output", output)
    finish(start("training.generate", "--checkpoint", merged, *words))
    yield {"main job": "text", "found": json.dumps(output.read_text()).replace("|", "/")}


def _curve(model: Path) -> list[float]:
    """The losses of all steps."""
    return [float(row["lm_loss"]) for row in read_rows(model / "train.csv") if row["lm_loss"]]


def _differing(one: Path, other: Path) -> list[str]:
    """The tensors of two checkpoints, weights and moments, that differ in a bit."""
    import torch
    from safetensors.torch import load_file

    names = []
    for path in sorted(one.glob("*.safetensors")):
        theirs = load_file(other / path.name)
        names += [name for name, tensor in load_file(path).items() if not torch.equal(tensor, theirs[name])]
    return names


def float16(context: Context) -> Iterator[Row]:
    """Steps in float16: the loss scale falls until no gradient overflows, and the loss falls."""
    steps, scale = 20, 2.0 ** (20 if context.toy else 30)  # the loss is divided by the batch's tokens
    train = {"iterations": steps, "precision": "float16", "initial_loss_scale": scale, "hysteresis": 1}
    config, model = write_run(context.folder / "float16", context, train)
    finish(start("training.train", "--config", config, "--model", "gpt2"))
    losses, skipped = _curve(model), sum(int(row["skipped"]) for row in read_rows(model / "train.csv"))
    yield {"float16": f"{steps} steps", "skipped": skipped, "first loss": losses[0], "last loss": losses[-1]}
    if not losses[-1] < losses[0]:
        raise ToolkitError("the loss did not fall")


ITEMS = (
    Item("smoke", "device", device, limit=40, vital=True),
    Item("smoke", "build", build, limit=60, vital=True),
    Item("smoke", "check", check, limit=60, vital=True),
    Item("smoke", "main job", main_job, limit=150, vital=True),
    Item("smoke", "mesh of one rank", mesh, limit=120),
    Item("smoke", "float16", float16, limit=90),
    Item("smoke", "compute-sanitizer", sanitizer, limit=90),
)
"""The first two run one after the other, then all others at once."""
