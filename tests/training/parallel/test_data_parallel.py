"""ZeRO in every precision: what a rank keeps follows from the shapes; all stages learn alike."""

import gc
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.helpers import Session, make_run, on_ranks, open_session, plan_of, step_batches, train_steps
from training.launch.process_group import World
from training.parallel.data_parallel import before_backward
from training.parallel.dtensor import local_shard
from training.step import train_step

STAGES, PRECISIONS, RECOMPUTE = (0, 1, 2, 3), ("float32", "bfloat16", "float16"), ("none", "selective", "full")
LOSS_SCALE = 2.0**10  # float16: no gradient of this model over- or underflows with it


def course(session: Session, steps: int = 3) -> list[tuple[float, float]]:
    """Losses and gradient norms."""
    scale = LOSS_SCALE if session.experiment.train.precision == "float16" else 1.0
    return [step[:2] for step in train_steps(session, steps, scale=scale)]


def whole_weights(session: Session) -> int:
    """Bytes of tensors as large as a whole matrix of the model that were made since gc.freeze."""
    shapes = {tuple(value.shape) for value in session.parameters.values() if value.dim() == 2}
    shapes |= {shape[::-1] for shape in shapes}
    gc.collect()
    # issubclass: isinstance would ask lazy objects of other libraries for their class
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor) and type(found) is not DTensor]
    storages = [tensor.untyped_storage() for tensor in tensors if tuple(tensor.shape) in shapes]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def weights_of_a_step(session: Session) -> dict[str, int]:
    """Bytes of whole weights: within layers (the most), between the passes, after a step."""
    (stage,) = session.stages
    (batch, *_) = next(step_batches(session, 0))
    within: list[int] = []
    hooks = [
        block.attn.core.register_forward_hook(lambda *_: within.append(whole_weights(session)))  # type: ignore[union-attr, operator]
        for block in stage.model.h.values()
    ]
    gc.collect()
    gc.freeze()  # what exists now is no longer listed: parameters and moments
    before_backward(stage, True, session.experiment.parallel.zero_stage)
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):  # makes Python objects of saved tensors
        loss = stage(batch.tokens, batch.positions, batch.targets).sum()
    forward = whole_weights(session)
    loss.backward()
    for hook in hooks:
        hook.remove()
    del loss
    course(session, steps=1)
    after = whole_weights(session)
    gc.unfreeze()
    return {"within": max(within), "forward": forward, "after": after}


class Traffic(TorchDispatchMode):
    """Counts gathers of parameters, sums of gradients over ranks, copies or casts of parameters."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.gathers = self.sums = self.casts = 0
        self._parameters = {local_shard(value).untyped_storage().data_ptr() for value in session.parameters.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        c10d, copies = torch.ops.c10d, (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        self.gathers += func is c10d._allgather_base_.default
        self.sums += func is c10d._reduce_scatter_base_.default
        self.sums += func is c10d.allreduce_.default and args[0][0].numel() > 4  # the others: loss, norm, targets
        if func in copies:
            self.casts += args[copies.index(func)].untyped_storage().data_ptr() in self._parameters
        return func(*args, **(kwargs or {}))


def traffic_of_steps(session: Session) -> list[list[int]]:
    """Gathers, sums and casts in a step of one micro-batch, and in a step of two."""
    counts = []
    for micro_batches in (1, 2):
        with Traffic(session) as traffic:
            train_step(session, 1, next(step_batches(session, 0))[:micro_batches], 0.0)
        counts.append([traffic.gathers, traffic.sums, traffic.casts])
    return counts


def measured(world: World, config: Path, precision: str) -> dict[str, Any]:
    """What a kind of recompute and a ZeRO stage keep and learn, by their names."""
    seen: dict[str, Any] = {}
    for recompute, zero_stage in product(RECOMPUTE, STAGES):
        keys = (f"train.precision={precision}", f"train.recompute={recompute}", f"parallel.zero_stage={zero_stage}")
        session = open_session(plan_of(config, *keys), world)
        seen[f"{recompute} {zero_stage}"] = weights_of_a_step(session)
        if recompute == "none":
            session = open_session(session.plan, world)
            seen[f"{zero_stage}"] = course(session)
            seen[f"{zero_stage} traffic"] = traffic_of_steps(session)
    return seen


WIDTH, LAYERS, LENGTH = 80, 4, 24  # no activation, shard or pair of matrices has the shape of another matrix
HEAD = 384 * WIDTH  # elements of the token embedding, the vocabulary padded
ROOT = HEAD + LENGTH * WIDTH  # of both embeddings
LAYER = 12 * WIDTH**2  # of a layer's matrices: 3 + 1 for attention, 4 + 4 for the MLP


@pytest.mark.parametrize(
    "precision", [pytest.param(name, marks=[pytest.mark.slow] * (name != "bfloat16")) for name in PRECISIONS]
)
def test_whole_weights_are_alive_only_where_the_stage_needs_them_and_all_learn_alike(
    tmp_path: Path, precision: str
) -> None:
    """Weights once, in the type of the products; stage 3: of one layer at a time, and embeddings.

    Stages differ by sums in another order, 1e-7. AdamW amplifies that, and from then on a weight
    may be rounded to the other side: by less than a unit roundoff. One process rounds the sum of
    the embeddings, ranks each of the two: the loss and the first norm differ by less than a unit
    roundoff, later norms by more.
    """
    model = {"n_layer": LAYERS, "n_embd": WIDTH, "seq_len": LENGTH, "dropout": 0.0}
    config = make_run(tmp_path, model=model, parallel={"data": 2})
    ranks = on_ranks(2, measured, config, precision)
    assert ranks[0] == ranks[1]
    size = getattr(torch, precision).itemsize
    for zero_stage, recompute in product(STAGES, RECOMPUTE):
        weights = ranks[0][f"{recompute} {zero_stage}"]
        gathered = ROOT if zero_stage == 3 else ROOT + LAYERS * LAYER
        assert weights["forward"] == (gathered + HEAD) * size  # the head's gradient exists, too
        assert weights["after"] == 0
        if zero_stage == 3:
            computed_again = recompute != "none"  # in the backward pass
            assert weights["within"] == (ROOT + LAYER + HEAD * computed_again) * size

    groups, parameters = LAYERS + 1, 12 * LAYERS + 4
    for zero_stage, count in product(STAGES, (1, 2)):  # micro-batches; stages 0 to 2 keep parameters between them
        gathers = (0, groups, groups, (2 * LAYERS + 1) * count)[zero_stage]
        sums = groups * (count if zero_stage >= 2 else 1)
        casts = 0 if zero_stage else parameters
        assert ranks[0][f"{zero_stage} traffic"][count - 1] == [gathers, sums, casts]

    first, *others = (ranks[0][f"{stage}"] for stage in STAGES)
    near = max(torch.finfo(getattr(torch, precision)).eps / 2, 1e-5)
    for other in others:
        assert tuple(other[0]) == pytest.approx(first[0], rel=1e-5)
        assert [*map(tuple, other)] == [pytest.approx(step, rel=near) for step in first]
    alone = course(open_session(plan_of(config, f"train.precision={precision}", "parallel.data=1")))
    near = max(torch.finfo(getattr(torch, precision)).eps / 2, 1e-6)
    assert [loss for loss, _ in first] == pytest.approx([loss for loss, _ in alone], rel=near)
    assert first[0][1] == pytest.approx(alone[0][1], rel=near)
