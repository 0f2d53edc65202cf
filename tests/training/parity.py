"""Every layout against the single process: 20 steps from one checkpoint, on real text, dropout 0, float32.

    python -m tests.training.parity            # the table of docs/parallelism.md

float32 sums in another order differ by 1e-7; the optimiser amplifies that, and a wrong split is off by 1e-2 and more.
The key bias is left out: its gradient is mathematically zero, its value rounding alone.
"""

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.settings import ModelSettings
from tests.training.helpers import (
    ALONE,
    BYTE_VOCABULARY,
    byte_documents,
    launch_ok,
    make_run,
    open_session,
    save_checkpoint,
    settings_of,
    write_corpus,
)
from tests.training.worker import steps
from training import checkpoint
from training.checkpoint import Progress
from training.model import GPT2
from training.model_folder import checkpoint_folder
from training.planning.run import make_plan

TOLERANCE = {"loss": 1e-5, "norm": 1e-5, "valid": 1e-5, "weights": 1e-4}
MODEL = {"n_layer": 5, "n_head": 4, "n_embd": 32, "seq_len": 16, "dropout": 0.0}  # 5 layers: no even split
SPLIT = {"wte.weight": 0, "c_attn.weight": 0, "c_attn.bias": 0, "c_fc.weight": 0, "c_fc.bias": 0, "c_proj.weight": 1}
TRAIN = {"global_batch_size": 8, "micro_batch_size": 2, "lr": 2e-3}


@dataclass(frozen=True)
class Layout:
    """One parallel layout."""

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    schedule: str = "1f1b"
    data: int = 1
    zero: int = 0
    recompute: str = "none"
    loss: str = "whole"
    vocab_size: int = BYTE_VOCABULARY

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def virtual(self) -> int:
        return 2 if self.schedule == "interleaved_1f1b" else 1

    def __str__(self) -> str:
        parts = [f"tp{self.tensor}" + "+sp" * self.sequence] * (self.tensor > 1)
        parts += [f"pp{self.pipeline} {self.schedule}"] * (self.pipeline > 1)
        parts += [f"dp{self.data} zero{self.zero}"] * (self.data > 1)
        parts += [f"{self.recompute} recompute"] * (self.recompute != "none")
        parts += [f"{self.loss} loss"] * (self.loss != "whole")
        parts += [f"vocabulary {self.vocab_size:,}"] * (self.vocab_size != BYTE_VOCABULARY)
        return ", ".join(parts) or "single"

    def sections(self, iterations: int) -> dict[str, Any]:
        """The configuration's sections `parallel` and `train`."""
        parallel = {"tensor": self.tensor, "sequence_parallel": self.sequence, "data": self.data}
        parallel |= {"pipeline": self.pipeline, "schedule": self.schedule, "virtual_stages": self.virtual}
        train = {**TRAIN, "recompute": self.recompute, "loss": self.loss, "iterations": iterations}
        return {"parallel": {**parallel, "zero_stage": self.zero}, "train": train}


# Each axis has a layout that shows its missing reduction; these run in every test run.
QUICK = [
    Layout(tensor=2, sequence=True, loss="chunked"),
    Layout(tensor=2, pipeline=2, schedule="interleaved_1f1b"),
    Layout(data=2, zero=2),
    Layout(data=2, zero=3, recompute="full"),
    Layout(tensor=2, data=2),
    Layout(pipeline=4),  # 1F1B: middle stages receive into fewer buffers than micro-batches
    Layout(pipeline=2, schedule="gpipe", data=2, zero=1, recompute="selective"),
]
LAYOUTS = [
    *QUICK,
    Layout(tensor=2),
    Layout(tensor=4, sequence=True),
    Layout(tensor=2, sequence=True, pipeline=2, data=2, zero=1),
    Layout(data=2, zero=1),
    Layout(pipeline=2, schedule="gpipe", recompute="full"),
    Layout(pipeline=2, schedule="interleaved_1f1b", data=2, zero=0),
    Layout(tensor=2, sequence=True, data=2, zero=2, recompute="full"),
    Layout(pipeline=2, schedule="interleaved_1f1b", data=2, zero=3),
    Layout(tensor=2, pipeline=2, schedule="gpipe", recompute="selective"),
    Layout(tensor=2, sequence=True, pipeline=2, schedule="interleaved_1f1b"),
    Layout(tensor=4, sequence=True, pipeline=2),
    Layout(tensor=2, pipeline=2, schedule="interleaved_1f1b", data=2, zero=3, recompute="full"),
    Layout(tensor=2, pipeline=2, data=2, zero=1, vocab_size=50257),
]


@dataclass
class Seen:
    """The losses, norms and shapes that each rank saw, and the final weights."""

    ranks: list[dict[str, Any]]
    weights: dict[str, Tensor] = field(repr=False)


def _configuration(folder: Path, vocab_size: int, **sections: Any) -> Path:
    """A byte corpus labelled with this vocabulary, and the configuration of a run on it."""
    config = make_run(folder, model={**MODEL, "vocab_size": vocab_size}, **sections)
    write_corpus(settings_of(config).dataset_prefix, byte_documents(60), vocab_size)
    return config


def write_start(folder: Path, vocab_size: int = BYTE_VOCABULARY, iterations: int = 20) -> None:
    """The checkpoint that all layouts of a vocabulary start from, and the single process's run from it."""
    plan = make_plan(settings_of(_configuration(folder, vocab_size, train=TRAIN)), "tiny")
    session = open_session(plan, ALONE)
    save_checkpoint(folder / "seed", session.parameters, session.optimizer, Progress(0, 0), plan)
    run_layout(Layout(vocab_size=vocab_size), folder, folder / "single", iterations)


def run_layout(layout: Layout, start: Path, folder: Path, iterations: int = 20) -> Seen:
    """Train a layout for some steps from the checkpoint of `write_start`."""
    config = _configuration(folder, layout.vocab_size, **layout.sections(iterations))
    seed = next((start / "seed").glob("iter_*"))
    shutil.copytree(seed, folder / "models" / "tiny" / seed.name)
    if layout.processes == 1:
        (folder / "seen.0.json").write_text(json.dumps(steps(config, ALONE, save_at=iterations)))
    else:
        launch_ok(layout.processes, "tests.training.worker", config, folder / "seen", "--save-at", iterations)
    return read_run(folder, iterations)


def read_run(folder: Path, iterations: int = 20) -> Seen:
    """What `run_layout` left in a folder."""
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("seen.*.json"))]
    saved = checkpoint.read_manifest(checkpoint_folder(folder / "models" / "tiny", iterations))
    return Seen(ranks, checkpoint.load_weights(saved))


def differences(seen: Seen, single: Seen) -> dict[str, float]:
    """The largest relative differences of loss, gradient norm, validation loss and merged parameters."""
    alone = single.ranks[0]
    pairs = {"valid": [(rank["valid"], alone["valid"]) for rank in seen.ranks]}
    for key in ("loss", "norm"):
        pairs[key] = [pair for rank in seen.ranks for pair in zip(rank[key], alone[key], strict=True)]
    found = {key: max(abs(a - b) / abs(b) for a, b in those) for key, those in pairs.items()}
    return found | {"weights": weights_difference(seen.weights, single.weights)}


@torch.no_grad()
def weights_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative difference of a tensor's norm. Not of the key bias, whose gradient is rounding alone."""
    pairs = [[_without_key_bias(name, weights[name]) for weights in (found, expected)] for name in expected]
    return max(float((a - b).norm()) / max(float(b.norm()), 1e-30) for a, b in pairs)


def _without_key_bias(name: str, weight: Tensor) -> Tensor:
    """c_attn's rows are [head, (q, k, v), dim]."""
    return weight.view(MODEL["n_head"], 3, -1)[:, [0, 2]] if name.endswith("c_attn.bias") else weight


def expected_shapes(layout: Layout, rank: int) -> dict[str, list[int]]:
    """The shapes that rank `rank` must hold; ranks are (pp, dp, tp) with tp fastest."""
    tensor = layout.tensor
    data_rank, pipeline_rank = rank // tensor % layout.data, rank // tensor // layout.data
    stages = layout.pipeline * layout.virtual
    edges = [math.ceil(MODEL["n_layer"] * stage / stages) for stage in range(stages + 1)]
    mine = range(pipeline_rank, stages, layout.pipeline)
    rows = math.ceil(layout.vocab_size / (128 * tensor)) * 128 * tensor
    with torch.device("meta"):
        model = GPT2(ModelSettings(**{**MODEL, "vocab_size": rows}))
    shapes: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        module, *rest = name.split(".")
        stages_of = {"wte": {0, stages - 1}, "wpe": {0}, "ln_f": {stages - 1}}
        layers = {stage for stage in range(stages) if module == "h" and edges[stage] <= int(rest[0]) < edges[stage + 1]}
        if not stages_of.get(module, layers) & {*mine}:
            continue
        shape = list(parameter.shape)
        for end, dim in SPLIT.items():
            if name.endswith(end):
                shape[dim] //= tensor
        if layout.zero:
            size = math.ceil(shape[0] / layout.data)
            shape[0] = max(0, min(shape[0], size * (data_rank + 1)) - size * data_rank)
        shapes[name] = shape
    return shapes


def main() -> int:
    """Run all layouts and print their table."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for number, layout in enumerate(LAYOUTS):
            start = Path(name) / f"start-{layout.vocab_size}"
            if not start.exists():
                write_start(start, layout.vocab_size)
            found = differences(run_layout(layout, start, Path(name) / str(number)), read_run(start / "single"))
            figures = " | ".join(f"{found[key]:.1e}" for key in TOLERANCE)
            rows.append(f"| {layout} | {layout.processes} | {figures} |")
            print(rows[-1], file=sys.stderr, flush=True)
    print("| layout | processes | loss | gradient norm | validation loss | parameters |\n|---|---|---|---|---|---|")
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
