"""Measures what autograd keeps from a stage's forward pass, on real tensors with fake ranks; run as one process.

python -m tests.training.planning.saved_activations '[{"model": {…}, "parallel": {…}, "train": {…}}]'
"""

import gc
import json
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.settings import Experiment
from tests.training.planning.simulated_step import CPU, Storages
from training import trainer
from training.parallel.process_group import World


def measure(case: dict[str, Any]) -> dict[str, int]:
    """Bytes that are kept after a forward pass: what hooks see, and in eager mode all new storages.

    `attention_dropout: false` takes the fused kernel, which a CPU has without dropout only and a GPU always.
    """
    sections = {key: case.get(key, {}) for key in ("model", "parallel", "train")}
    experiment = Experiment.model_validate({**sections, "train": {"iterations": 10, **sections["train"]}})
    size = experiment.world_size
    if size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        return _measure(experiment, size, case)
    finally:
        torch._dynamo.reset()
        if size > 1:
            dist.destroy_process_group()


def _measure(experiment: Experiment, size: int, case: dict[str, Any]) -> dict[str, int]:
    torch.manual_seed(0)
    session = trainer.open_session(experiment, World(0, size, CPU))
    (stage,) = session.stages
    for block in stage.model.h.values():
        if not case.get("attention_dropout", True):
            block.attn.core.dropout = 0.0  # type: ignore[union-attr]
    parameters = {
        (value.to_local() if isinstance(value, DTensor) else value).untyped_storage().data_ptr()
        for value in session.parameters.values()
    }
    found: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = plain.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = (storage.nbytes(), plain)
        return tensor

    tokens = torch.randint(0, 100, (experiment.train.micro_batch_size, experiment.model.seq_len))
    stage(tokens, None, tokens)  # compiles
    found.clear()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = stage(tokens, None, tokens)
    if case.get("list"):
        for size, plain in found.values():
            print(size, tuple(plain.shape), plain.dtype, file=sys.stderr)
    hooks = sum(size for size, _ in found.values())
    found.clear()
    del loss
    gc.collect()
    storages = Storages()
    if experiment.train.compile != "none":
        return {"hooks": hooks}
    with storages:
        for parameter in session.parameters.values():
            parameter.detach()
        before = storages.held
        loss = stage(tokens, None, tokens)
        after = storages.held
    del loss
    return {"hooks": hooks, "storages": after - before}


def main(argv: list[str]) -> int:
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps([measure(case) for case in json.loads(argv[0])]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
