"""Which operations a run uses where several compute the same: attention's kernel, and kernels of our own.

    choose_operations(experiment, world, folder)   # once per job, a collective call

What was measured is kept in MODEL_FOLDER/operations.json and used again by every later start with the same subject:
device, shapes, types and settings. So a resumed run computes in the same order, whatever else the GPU does that day.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.console import note, say
from common.errors import InputError
from common.files import read_json, write_json
from common.settings import Experiment
from training import attention
from training.kernels import choice, library
from training.parallel.collectives import all_gather, run_on_rank0
from training.parallel.process_group import World
from training.precision import precision_type


def choose_operations(experiment: Experiment, world: World, folder: Path) -> None:
    """Read or measure the choice on rank 0, and apply it on all ranks (a collective call). On CPUs nothing is chosen.

    Raises ConfigError for a choice that the GPU or another setting rules out.
    """
    if experiment.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product runs
        torch.use_deterministic_algorithms(True)
    if (ignored := ignored_keys(experiment, world.device.type)) and world.rank == 0:
        note(f"without effect here: {', '.join(ignored)}")
    if world.device.type != "cuda":
        return
    found = run_on_rank0(partial(_chosen, experiment, world.device, folder / "operations.json"), world.rank)
    attention.use(found["attention"])
    missing = bool(found["kernels"]) and library.prepare(report=world.rank == 0) != ""
    lacking = any(all_gather(missing))  # the same on all ranks: replicas would drift apart
    library.select([] if lacking else found["kernels"])


def ignored_keys(experiment: Experiment, device: str) -> list[str]:
    """The keys that were set but change nothing on this kind of device, or with so few ranks, each with the reason."""
    train, parallel = experiment.train, experiment.parallel
    keys = {
        f"train.attention={train.attention} (no GPU)": device == "cpu" and train.attention != "auto",
        f"train.kernels={train.kernels} (no GPU)": device == "cpu" and train.kernels == "on",
        f"parallel.zero_stage={parallel.zero_stage} (parallel.data is 1)": parallel.zero_stage and parallel.data == 1,
        "parallel.sequence_parallel (parallel.tensor is 1)": parallel.sequence_parallel and parallel.tensor == 1,
    }
    return [key for key, ignored in keys.items() if ignored]


def _chosen(experiment: Experiment, device: torch.device, path: Path) -> dict[str, Any]:
    """The recorded choice, or a new one, which is recorded."""
    subject = _subject(experiment, device)
    try:
        recorded = read_json(path)
        if recorded["subject"] == subject and {"attention", "kernels"} <= recorded.keys():
            return dict(recorded)
    except (OSError, InputError, KeyError, TypeError):
        pass
    named = experiment.train.attention
    candidates = attention.KERNELS if named == "auto" else (named,)
    times = attention.measure(_shape(experiment), _dtype(experiment, device), experiment.model.dropout, candidates)
    kernel = attention.fastest(times, experiment.train.deterministic)
    measured = ", ".join(f"{name} {time:.2f} ms" for name, time in times.items())
    say(f"attention: {kernel} ({measured} per layer, forward and backward)")
    kernels = choice.choose(None, experiment.train.kernels)["kernels"]
    kernels = [name for name in kernels if name != "causal_softmax" or kernel == "math"]
    found = {"subject": subject, "attention": kernel, "milliseconds": times, "kernels": kernels}
    write_json(path, found)
    return found


def _subject(experiment: Experiment, device: torch.device) -> dict[str, Any]:
    """What a choice depends on, as plain data."""
    train = experiment.train
    subject = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "shape": _shape(experiment)._asdict(),
        "dtype": str(_dtype(experiment, device)),
        "dropout": experiment.model.dropout,
        "settings": {key: getattr(train, key) for key in ("attention", "kernels", "deterministic", "compile")},
    }
    copy: dict[str, Any] = json.loads(json.dumps(subject))  # as it is read again
    return copy


def _dtype(experiment: Experiment, device: torch.device) -> torch.dtype:
    return precision_type(experiment.train.precision, device)


def _shape(experiment: Experiment) -> attention.Shape:
    model = experiment.model
    heads = model.n_head // experiment.parallel.tensor
    return attention.Shape(experiment.train.micro_batch_size, heads, model.seq_len, model.n_embd // model.n_head)
