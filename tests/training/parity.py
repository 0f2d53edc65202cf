"""Every layout against the single process, on real text, dropout 0: training, resuming, files.

    python -m tests.training.parity            # the table of docs/parallelism.md

All layouts of as many processes train in one job, one after the other, from one checkpoint; each
then resumes the checkpoint of the layout before it. float32 sums in another order differ by 1e-7;
the optimiser amplifies that, and a wrong split is off by 1e-2 and more. The key bias is left out:
its gradient is mathematically zero, its value rounding alone.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.training.helpers import (
    ALONE,
    BYTE_VOCABULARY,
    byte_documents,
    on_ranks,
    open_session,
    plan_of,
    save_checkpoint,
    step_batches,
    write_config,
    write_corpus,
)
from training import checkpoint
from training.checkpoint import Progress
from training.launch.process_group import World
from training.model_folder import checkpoint_folder
from training.monitoring.outputs import next_logits
from training.optimizer import learning_rate
from training.parallel.dtensor import local_shard
from training.step import train_step, validate

TOLERANCE = {"loss": 1e-5, "norm": 1e-5, "valid": 1e-5, "weights": 1e-4, "value": 1e-4}
"""Relative, in float32; see `differences` and `distance`."""
MODEL = {"n_layer": 5, "n_head": 4, "n_embd": 32, "seq_len": 16, "dropout": 0.0}  # 5 layers: no even split
STEPS, MORE = 3, 2
"""Before the checkpoint, and after resuming."""
LOSS_SCALE = 2.0**10  # float16: no gradient of this model over- or underflows with it
_VALID = 11  # samples: no multiple of a batch


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
    precision: str = "float32"
    optimizer: str = "adamw"

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def virtual(self) -> int:
        return 2 if self.schedule == "interleaved_1f1b" else 1

    @property
    def single(self) -> "Layout":
        """The single process that this layout is compared with."""
        return Layout(vocab_size=self.vocab_size, precision=self.precision, optimizer=self.optimizer)

    def __str__(self) -> str:
        parts = [f"tp{self.tensor}" + "+sp" * self.sequence] * (self.tensor > 1)
        parts += [f"pp{self.pipeline} {self.schedule}"] * (self.pipeline > 1)
        parts += [f"dp{self.data} zero{self.zero}"] * (self.data > 1)
        parts += [f"{self.recompute} recompute"] * (self.recompute != "none")
        parts += [f"{self.loss} loss"] * (self.loss != "whole")
        parts += [self.precision] * (self.precision != "float32")
        parts += [self.optimizer] * (self.optimizer != "adamw")
        parts += [f"vocabulary {self.vocab_size:,}"] * (self.vocab_size != BYTE_VOCABULARY)
        return ", ".join(parts) or "single"

    def write(self, folder: Path, prefix: Path, iterations: int) -> Path:
        """The configuration of a run in this layout."""
        parallel = {"tensor": self.tensor, "sequence_parallel": self.sequence, "data": self.data}
        parallel |= {"pipeline": self.pipeline, "schedule": self.schedule, "virtual_stages": self.virtual}
        train = {"global_batch_size": 8, "micro_batch_size": 1 if self.data > 2 else 2, "lr": 2e-3}
        train |= {"eps": 1e-4}  # with 1e-8, rounding decides the updates of elements with tiny gradients
        train |= {"recompute": self.recompute, "loss": self.loss, "precision": self.precision, "split": "60,1,0"}
        train |= {"optimizer": self.optimizer}
        return write_config(
            folder,
            {**MODEL, "vocab_size": self.vocab_size},
            {**parallel, "zero_stage": self.zero},
            {**train, "iterations": iterations},
            data=[{"prefix": str(prefix), "weight": 1}],
        )


# Each axis has a layout that shows its missing reduction; each kind of cut tensor is merged.
QUICK = [
    Layout(tensor=4, sequence=True),
    Layout(data=4, zero=2),
    Layout(tensor=2, pipeline=2, schedule="interleaved_1f1b"),
    Layout(tensor=2, data=2, loss="chunked"),
    Layout(data=4, zero=3, recompute="full"),
    Layout(pipeline=4),  # 1F1B: middle stages receive into fewer buffers than micro-batches
    Layout(tensor=2, sequence=True, data=2, zero=1),
    Layout(pipeline=2, schedule="gpipe", data=2, zero=1, recompute="selective"),
    Layout(tensor=2, data=2, zero=3),
    Layout(pipeline=2, schedule="interleaved_1f1b", data=2, zero=3),
    Layout(pipeline=2, data=2, zero=2),
    Layout(tensor=2, sequence=True, data=2, zero=2, precision="bfloat16"),
    Layout(pipeline=2, data=2, zero=3, precision="float16"),
    Layout(tensor=2, sequence=True, data=2, zero=3, optimizer="muon"),
    Layout(pipeline=2, data=2, optimizer="muon"),
]
_TENSOR = ((1, False), (2, False), (2, True))
_PIPELINE = ((1, "1f1b"), (2, "1f1b"), (2, "gpipe"), (2, "interleaved_1f1b"))
_DATA = ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3))
GRID = [
    layout
    for precision in ("float32", "bfloat16", "float16")
    for (tensor, sequence), (pipeline, schedule), (data, zero) in product(_TENSOR, _PIPELINE, _DATA)
    for layout in [Layout(tensor, sequence, pipeline, schedule, data, zero, precision=precision)]
    # reduced precision is slow on CPUs: all of the data axis, and the last of the others
    if layout.processes > 1 and (precision == "float32" or (sequence, schedule) in ((False, "1f1b"), (True, "gpipe")))
] + [
    Layout(tensor=4, sequence=True, pipeline=2),
    Layout(tensor=2, pipeline=2, schedule="interleaved_1f1b", data=2, zero=3, recompute="full"),
    Layout(tensor=2, pipeline=2, data=2, zero=1, vocab_size=50257),
    *(Layout(2, True, data=2, zero=3, precision=precision, optimizer="muon") for precision in ("bfloat16", "float16")),
]


def write_start(folder: Path, single: Layout, steps: int = STEPS) -> None:
    """A vocabulary's dataset, the checkpoint to start from, the single process's run from it."""
    documents = byte_documents(60)
    valid = np.concatenate(documents)[: _VALID * MODEL["seq_len"] + 1]  # an evaluation also counts tokens after samples
    documents = [*documents, valid]
    write_corpus(folder / "dataset", documents, single.vocab_size)
    plan = plan_of(single.write(folder, folder / "dataset", steps))
    session = open_session(plan, ALONE)
    save_checkpoint(folder / "seed", session.parameters, session.optimizer, Progress(0, 0), plan)
    config = single.write(folder / "single", folder / "dataset", steps + MORE)
    note(config.parent, [train(ALONE, config, folder, folder / "single", steps)])


def train(world: World, config: Path, start: Path, resumed: Path, steps: int = STEPS) -> dict[str, Any]:
    """Train from the seed and save; then resume the checkpoint of `resumed` (a collective call).

    Losses and gradient norms of all steps, and of the checkpoint: validation loss, logits,
    parameters of this rank.
    """
    plan = plan_of(config)
    session, section = open_session(plan, world), plan.experiment.train
    scale = LOSS_SCALE if section.precision == "float16" else 1.0
    seen: dict[str, Any] = {"loss": [], "norm": []}

    def continued(folder: Path, count: int) -> Progress:
        newest = checkpoint.resolve(folder)
        checkpoint.load(newest, session.parameters, session.optimizer)
        progress = newest.progress
        with closing(step_batches(session, progress.consumed_samples)) as batches:
            for iteration in range(progress.iteration + 1, progress.iteration + 1 + count):
                step = train_step(session, iteration, next(batches), learning_rate(iteration - 1, section), scale)
                seen["loss"].append(step.loss)
                seen["norm"].append(step.grad_norm)
                progress = Progress(iteration, progress.consumed_samples + section.global_batch_size)
        return progress

    progress = continued(next((start / "seed").glob("iter_*")), steps)
    seen["valid"] = validate(session, plan.data.valid, plan.data.valid.per_epoch)
    seen["logits"] = next_logits(session, b"The").tolist()
    seen["parameters"] = sum(local_shard(value).numel() for value in session.parameters.values())
    save_checkpoint(config.parent / "models/tiny", session.parameters, session.optimizer, progress, plan)
    continued(saved_in(resumed, steps), MORE)
    return seen


def run_layouts(folder: Path, layouts: Sequence[Layout], starts: Sequence[Path], steps: int = STEPS) -> None:
    """Train layouts, in folders of their numbers; resume the last of each start on one process.

    `starts` are the folders of `write_start` for each layout.
    """
    last: dict[Path, tuple[Layout, Path]] = {}
    cells: list[tuple[int, tuple[Path, Path, Path]]] = []
    for number, (layout, start) in enumerate(zip(layouts, starts, strict=True)):
        config = layout.write(folder / str(number), start / "dataset", steps + MORE)
        before = last[start][1] if start in last else start / "single"
        cells.append((layout.processes, (config, start, before)))
        last[start] = layout, config.parent
    for size, group in groupby(cells, lambda cell: cell[0]):
        runs = [run for _, run in group]
        of_ranks = on_ranks(size, train_all, runs, steps, timeout=900)
        for (config, *_), seen in zip(runs, zip(*of_ranks, strict=True), strict=True):
            note(config.parent, seen)
    for start, (layout, run) in last.items():
        config = layout.single.write(run / "alone", start / "dataset", steps + MORE)
        note(config.parent, [train(ALONE, config, start, run, steps)])


def train_all(world: World, runs: Sequence[tuple[Path, Path, Path]], steps: int) -> list[dict[str, Any]]:
    """What one rank sees of runs, one after the other."""
    return [train(world, config, start, resumed, steps) for config, start, resumed in runs]


def note(run: Path, seen: Sequence[dict[str, Any]]) -> None:
    """Keep what each rank saw."""
    (run / "seen.json").write_text(json.dumps(seen))


def saved_in(run: Path, steps: int = STEPS) -> Path:
    """The checkpoint of a run."""
    return checkpoint_folder(run / "models" / "tiny", steps)


def ranks_of(run: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    seen: list[dict[str, Any]] = json.loads((run / "seen.json").read_text())
    return seen


def differences(run: Path, start: Path, steps: int = STEPS) -> dict[str, float]:
    """The largest relative differences of loss, gradient norm, validation loss and parameters."""
    single = start / "single"
    (alone,), ranks = ranks_of(single), ranks_of(run)
    pairs = {"valid": [(rank["valid"], alone["valid"]) for rank in ranks]}
    for key in ("loss", "norm"):
        pairs[key] = [pair for rank in ranks for pair in zip(rank[key], alone[key], strict=True)]
    found = {key: max(abs(a - b) / abs(b) for a, b in those) for key, those in pairs.items()}
    mine, theirs = (checkpoint.load_weights(checkpoint.read_manifest(saved_in(one, steps))) for one in (run, single))
    return found | {"weights": weights_difference(mine, theirs)}


@torch.no_grad()
def weights_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative difference of a tensor's norm, without the key bias: all rounding."""
    pairs = [[without_key_bias(name, weights[name]) for weights in (found, expected)] for name in expected]
    return max(float((a - b).norm()) / max(float(b.norm()), 1e-30) for a, b in pairs)


def distance(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Path) -> dict[str, float]:
    """How far weights differ: `value`, by each tensor's largest; `course`, by training's way."""
    seed = checkpoint.load_weights(checkpoint.resolve(next((start / "seed").glob("iter_*"))))
    found, right, before = (
        {name: without_key_bias(name, side[name]) for name in seed} for side in (weights, expected, seed)
    )
    moved, missed = (
        torch.cat([(right[name] - other[name]).flatten() for name in seed]).norm() for other in (before, found)
    )
    apart = max(float((found[name] - right[name]).abs().max() / right[name].abs().max()) for name in seed)
    return {"value": apart, "course": float(missed / moved)}


def without_key_bias(name: str, weight: Tensor) -> Tensor:
    """c_attn's rows are [head, (q, k, v), dim]."""
    return weight.view(MODEL["n_head"], 3, -1)[:, [0, 2]] if name.endswith("c_attn.bias") else weight


def main() -> int:
    """Run all layouts in float32 and print their table."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        layouts = [layout for layout in QUICK if layout.precision == "float32"]
        starts = {single: Path(name) / str(single) for single in {layout.single for layout in layouts}}
        for single, start in starts.items():
            write_start(start, single, 20)
        folder = Path(name) / "layouts"
        run_layouts(folder, layouts, [starts[layout.single] for layout in layouts], 20)
        for number, layout in enumerate(layouts):
            found = differences(folder / str(number), starts[layout.single], 20)
            figures = " | ".join(f"{found[key]:.1e}" for key in ("loss", "norm", "valid", "weights"))
            rows.append(f"| {layout} | {layout.processes} | {figures} |")
    print("| layout | processes | loss | gradient norm | validation loss | parameters |\n|---|---|---|---|---|---|")
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
