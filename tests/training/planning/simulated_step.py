"""Runs the trainer's real step on tensors without memory, and reports how many bytes it would hold.

    python -m tests.training.planning.simulated_step '[{"model": {…}, "parallel": {…}, "train": {…}, "rank": 0}]'

Tensors are fake (shapes without storage), and so are the other ranks: collectives return at once. Every storage is
counted from its allocation to its end, so the peak is exact for eager mode, at any size, on any machine.
"""

import gc
import json
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from common.settings import Experiment
from training import trainer
from training.dataset.batches import Batch
from training.kernels import cross_entropy
from training.optimizer import take_step
from training.parallel import layout
from training.parallel.dtensor import local_shard
from training.parallel.gradients import sync_gradients
from training.parallel.layout import make_mesh
from training.parallel.pipeline import Stage
from training.parallel.process_group import World
from training.step import Session, run_micro_batches

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
_MESH_METHODS = (
    "__init__",
    "__getitem__",
    "get_group",
    "get_local_rank",
    "get_coordinate",
    "_flatten",
    "_get_all_submeshes",
)


class Storages(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, and keeps the largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._sizes: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._add(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._sizes and tensor.device.type != "meta":
            self._sizes[storage] = [0]
            weakref.finalize(storage, self._free, self._sizes[storage])
            self.resized(tensor)

    def resized(self, tensor: Tensor) -> None:
        """FSDP frees and allocates gathered parameters by the size of their storage."""
        storage = tensor.untyped_storage()
        size, new = self._sizes[storage], storage.nbytes()
        self.held += new - size[0]
        size[0] = new
        self.peak = max(self.peak, self.held)

    def following(self, resize: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """A function that changes the size of a tensor's storage, with the change counted."""

        def counted(tensor: Tensor) -> None:
            resize(tensor)
            self.resized(tensor)

        return counted

    def _free(self, size: list[int]) -> None:
        self.held -= size[0]


def _to_empty(self: Stage, *, device: torch.device, recurse: bool = True) -> Stage:
    """nn.Module.to_empty replaces storages in place, which fake tensors do not allow."""
    for module in self.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device))
    return self


def _real(method: Callable[..., Any]) -> Callable[..., Any]:
    """Meshes read the values of their tensors."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return method(*arguments, **options)

    return wrapped


def _forward_flops(q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]


def _backward_flops(gradient: Any, q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    return int(sdpa_backward_flop_count(gradient, q, k, v))  # type: ignore[no-untyped-call]


_CPU_ATTENTION = {  # the counter knows only the kernels of GPUs
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}


def _static_shapes(_schedule: Any, stages: Any, *_: Any) -> None:
    """What the first exchange between the pipeline's ranks finds out."""
    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC  # type: ignore[attr-defined]


def _large_parts(logits: Tensor) -> list[slice]:
    """As on a GPU: the small parts for a CPU's cache take minutes to simulate."""
    size = max(1, (1 << 26) // max(1, logits.shape[1]))
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def simulate(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes at the peak of a step and of its parameters, gradients and moments, and operations of its passes.

    A case has `model`, `parallel` and `train` as in a configuration, and `rank`.
    """
    sections = {key: case.get(key, {}) for key in ("model", "parallel", "train")}
    experiment = Experiment.model_validate({**sections, "train": {"iterations": 10, **sections["train"]}})
    rank, size = case.get("rank", 0), experiment.world_size
    storages = Storages()
    patches = [
        patch.object(Stage, "to_empty", _to_empty),
        patch.object(layout, "copy_shard_", lambda *_: None),
        patch.object(layout, "initial_value", lambda *_: None),
        patch.object(cross_entropy, "_parts", _large_parts),
        patch.object(schedules._PipelineSchedule, "_warmup_p2p", _static_shapes, create=True),
        *(
            patch.object(module, name, storages.following(getattr(module, name)))
            for module, name in product((_fsdp_param, _fsdp_param_group), ("alloc_storage", "free_storage"))
            if hasattr(module, name)
        ),
        *(
            patch.object(DeviceMesh, name, _real(getattr(DeviceMesh, name)))
            for name in _MESH_METHODS
            if hasattr(DeviceMesh, name)
        ),
    ]
    if size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    for each in patches:
        each.start()
    try:
        mesh = make_mesh(experiment.parallel, "cpu")
        with FakeTensorMode(allow_non_fake_inputs=True), storages:
            return _measure(experiment, World(rank, size, CPU), mesh, storages)
    finally:
        for each in patches:
            each.stop()
        if size > 1:
            dist.destroy_process_group()


def _measure(experiment: Experiment, world: World, mesh: Any, storages: Storages) -> dict[str, Any]:
    session = trainer.open_session(experiment, world, mesh)
    tokens = torch.zeros((experiment.train.micro_batch_size, experiment.model.seq_len), dtype=torch.long)
    batches = [Batch(tokens.clone(), tokens.clone(), None, tokens.numel()) for _ in range(experiment.accumulation)]
    found: dict[str, Any] = {}
    counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
    for counting in (counter, nullcontext()):  # the first step allocates buffers, and a counter keeps tensors
        gc.collect()
        storages.peak = storages.held
        with counting:
            run_micro_batches(session, batches, 1.0, train=True)
        found |= _allocated(session)
        sync_gradients(session.parameters, mesh)
        take_step(session.optimizer, 1e-4, torch.ones(()))
        session.optimizer.zero_grad()
    return found | {"peak": storages.peak, "flops": counter.get_total_flops()}


def _allocated(session: Session) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients and moments."""

    def size(tensors: Iterable[Any]) -> int:
        storages = [local_shard(tensor).untyped_storage() for tensor in tensors]
        return sum({each._cdata: each.nbytes() for each in storages}.values())  # reduced gradients share theirs

    parameters = list(session.parameters.values())
    states = [session.optimizer.state[parameter] for parameter in parameters]
    return {
        "parameters": size(parameters),
        "gradients": size(parameter.grad for parameter in parameters),
        "optimizer": size(state[name] for state in states for name in ("exp_avg", "exp_avg_sq")),
    }


def simulated(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`simulate` for each case in one process of its own, because fake process groups are global."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.planning.simulated_step", json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: list[str]) -> int:
    warnings.simplefilter("ignore")
    print(json.dumps([simulate(case) for case in json.loads(argv[0])]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
