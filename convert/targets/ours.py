"""Write a source as a checkpoint that our training resumes from."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from common.settings import TrainSettings
from convert.assemble import assemble
from convert.sources.source import Source
from training import checkpoint
from training.checkpoint import Progress, Replicas, SavedRun
from training.moments import ADAMW, moments_of
from training.planning.run import Plan
from training.region import Region
from training.tensors import leaf_of


def write(source: Source, folder: Path, plan: Plan) -> Path:
    """Write `folder`/iter_*: weights, and the moments of the plan's optimiser, zeros unless the source has them.

    Returns the checkpoint's folder. Memory: one tensor per writing thread.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = source.model.sizes
    optimizer = plan.experiment.train.optimizer
    shapes: dict[str, tuple[int, ...]] = {"step": ()}
    for name in source.tensors:
        leaf = leaf_of(name)
        shapes |= {f"{kind}.{name}": leaf.shape(sizes) for kind in ("model", *moments_of(leaf, optimizer))}
    return checkpoint.write(
        SavedRun(folder, plan.experiment, plan.tokenize, plan.data.train),
        {key: Region.whole(shape) for key, shape in shapes.items()},
        _Assembled(source, shapes, source.has_moments(optimizer), plan.experiment.train),
        progress(source, plan),
        Replicas(),
    )


def progress(source: Source, plan: Plan) -> Progress:
    """Where the training continues; samples that the source did not count are those of the plan's batch size."""
    iteration, consumed = source.iteration or 0, source.consumed_samples
    return Progress(iteration, iteration * plan.experiment.train.global_batch_size if consumed is None else consumed)


class _Assembled(Mapping[str, Tensor]):
    """The tensors of a checkpoint of ours by name, each made when it is asked for; absent moments are zeros."""

    def __init__(
        self, source: Source, shapes: Mapping[str, tuple[int, ...]], has_moments: bool, train: TrainSettings
    ) -> None:
        self.source, self.shapes, self.has_moments, self.train = source, shapes, has_moments, train

    def __getitem__(self, key: str) -> Tensor:
        kind, _, name = key.partition(".")
        if kind == "model":
            return assemble(self.source, name, dtype=torch.float32)
        if not self.has_moments:
            return torch.zeros(self.shapes[key])
        if kind == "step":
            return torch.tensor(float(self.source.step or 0))
        if kind == ADAMW[1] and name in self.source.estimated:
            return self._second_moment(self[f"{ADAMW[0]}.{name}"])
        return assemble(self.source, name, dtype=torch.float32, tensor=self.source.moments[kind][name])

    def _second_moment(self, momentum: Tensor) -> Tensor:
        """AdamW's second moment of a matrix, from its momentum: the same for all elements.

        Of gradients that are mostly noise, an average with the decay rate b has (1 - b) / (1 + b) of the variance. A
        second moment of 0 makes the first steps ten times too large (docs/optimizers.md).
        """
        decay, beta2 = self.train.muon_momentum, self.train.betas[1]
        variance = momentum.square().mean() * (1 + decay) / (1 - decay)
        return torch.full_like(momentum, float(variance) * (1 - beta2 ** (self.source.step or 0)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
