"""Write a source as a checkpoint that our training resumes from."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from convert.assemble import assemble
from convert.sources.source import MOMENTS, Source
from training import checkpoint
from training.checkpoint import Progress, Replicas, SavedRun, Shard
from training.planning.run import Plan
from training.tensors import leaf_of


def write(source: Source, folder: Path, plan: Plan) -> Path:
    """Write `folder`/iter_*: weights, and moments if the source has them, else zeros. Returns the checkpoint's folder.

    Memory: one tensor per writing thread.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return checkpoint.write(
        SavedRun(folder, plan.experiment, plan.tokenize, plan.data.train),
        {key: Shard(shape, (0,) * len(shape), shape) for key in _keys(source) for shape in [_shape(source, key)]},
        _Assembled(source),
        progress(source, plan),
        Replicas(),
    )


def progress(source: Source, plan: Plan) -> Progress:
    """Where the training continues; samples that the source did not count are those of the plan's batch size."""
    iteration, consumed = source.iteration or 0, source.consumed_samples
    return Progress(iteration, iteration * plan.experiment.train.global_batch_size if consumed is None else consumed)


def _keys(source: Source) -> list[str]:
    return [f"{kind}.{name}" for kind in ("model", *MOMENTS) for name in source.tensors] + ["step"]


def _shape(source: Source, key: str) -> tuple[int, ...]:
    """The shape of a tensor in a checkpoint of ours."""
    return () if key == "step" else leaf_of(key.partition(".")[2]).shape(source.model.sizes)


class _Assembled(Mapping[str, Tensor]):
    """The tensors of a checkpoint of ours by name, each made when it is asked for."""

    def __init__(self, source: Source) -> None:
        self.source, self.moments, self.keys_ = source, source.has_moments, _keys(source)

    def __getitem__(self, key: str) -> Tensor:
        kind, _, name = key.partition(".")
        if key == "step":
            return torch.tensor(float(self.source.step or 0) if self.moments else 0.0)
        if kind == "model":
            return assemble(self.source, name, dtype=torch.float32)
        if self.moments:
            return assemble(self.source, name, dtype=torch.float32, tensor=self.source.moments[kind][name])
        return torch.zeros(_shape(self.source, key))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_)

    def __len__(self) -> int:
        return len(self.keys_)
