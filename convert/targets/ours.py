"""Write a source as a checkpoint that our training resumes from."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from common.errors import CheckpointError
from common.settings import Experiment, TrainSettings
from convert.assemble import assemble
from convert.sources.source import Source
from training import checkpoint
from training.checkpoint import Progress, Replicas, SavedRun
from training.moments import ADAMW, moments_of
from training.planning.run import Plan
from training.region import Region
from training.tensors import leaf_of


def check_fits(source: Source, experiment: Experiment, name: str) -> None:
    """Raises CheckpointError if the source's model is not that of the experiment `name`."""
    theirs, ours = source.model, experiment.model
    for key, size, flag in (
        ("n_layer", theirs.n_layer, ""),
        ("n_head", theirs.n_head, ", or give --num-heads"),
        ("n_embd", theirs.n_embd, ""),
        ("seq_len", theirs.n_positions, ""),
        ("vocab_size", theirs.vocab_size, ", or give --vocab-size"),
    ):
        if size != (wanted := getattr(ours, key)):
            raise CheckpointError(
                f"{source.path}: has {key} {size}, but models.{name}.model.{key} is {wanted}; set it to {size}{flag}"
            )
    for what, value, trained in (
        ("MLP width", theirs.n_inner, 4 * ours.n_embd),
        ("activation", theirs.activation.replace("gelu_pytorch_tanh", "gelu_new"), "gelu_new"),
        ("LayerNorm epsilon", theirs.layer_norm_epsilon, 1e-5),
        ("tied head", theirs.tied, True),
    ):
        if value != trained:
            raise CheckpointError(f"{source.path}: {what} is {value}; this toolkit trains {trained} only")


def describe_moments(source: Source, optimizer: str) -> str:
    """Whether `write` converts the source's moments for `optimizer`, in words."""
    if not source.has_moments(optimizer):
        return f"no optimiser state for {optimizer}: it starts from zero, and the learning rate with its warm-up"
    state = f"optimiser state for {optimizer} after {source.step} steps"
    if source.estimated and optimizer == "muon":
        state += f" (the second moment of {', '.join(source.estimated)}, which Muon updated there, is estimated)"
    return state


def write(source: Source, folder: Path, plan: Plan) -> Path:
    """Write `folder`/iter_*: weights, and the moments of the plan's optimiser, zeros if absent.

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
    """Where the training continues; unknown samples are iterations x the plan's batch size."""
    iteration, consumed = source.iteration or 0, source.consumed_samples
    return Progress(iteration, iteration * plan.experiment.train.global_batch_size if consumed is None else consumed)


class _Assembled(Mapping[str, Tensor]):
    """The tensors of a checkpoint of ours by name, made on access; absent moments are zeros."""

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

        For noise, an average with the decay rate b has (1 - b) / (1 + b) of the variance. A second
        moment of 0 would make the first steps ten times too large (docs/optimizers.md).
        """
        decay, beta2 = self.train.muon_momentum, self.train.betas[1]
        variance = momentum.square().mean() * (1 + decay) / (1 - decay)
        return torch.full_like(momentum, float(variance) * (1 - beta2 ** (self.source.step or 0)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
