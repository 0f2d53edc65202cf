"""Runs the trainer's real step on tensors without memory, and counts the bytes that it would hold.

Tensors are fake (shapes without storage), and so are the other ranks: collectives return at once.
Every storage is counted from its allocation to its end, so the peak is exact for eager mode, at any
size, on any machine.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import product
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

from common.settings import Experiment
from tests.training.helpers import ALONE
from training import loss
from training.dataset.batches import Batch
from training.kernels import ops
from training.launch.process_group import World
from training.parallel import layout
from training.parallel.dtensor import local_shard
from training.parallel.gradients import sync_gradients
from training.parallel.pipeline import Stage
from training.parallel.sizes import EAGER_ELEMENTS
from training.session import open_session
from training.step import run_micro_batches

# meshes read the values of their tensors
MESH_METHODS = "__init__ __getitem__ get_group get_local_rank get_coordinate _flatten _get_all_submeshes".split()


class Storages(TorchDispatchMode):
    """The bytes of all storages that operations made, and their largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._sizes: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._count(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type == "meta":
            return
        if storage not in self._sizes:
            self._sizes[storage] = [0]
            weakref.finalize(storage, self._resize, self._sizes[storage], 0)
        self._resize(self._sizes[storage], storage.nbytes())

    def _resize(self, size: list[int], new: int) -> None:
        self.held += new - size[0]
        size[0] = new
        self.peak = max(self.peak, self.held)

    def counting(self, resize: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """FSDP's function, which frees or allocates gathered parameters by the size of their
        storage.
        """

        def counted(tensor: Tensor) -> None:
            resize(tensor)
            self._count(tensor)

        return counted


def to_empty(self: Stage, *, device: torch.device, recurse: bool = True) -> Stage:
    """nn.Module.to_empty replaces storages in place, which fake tensors do not allow."""
    for module in self.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device))
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    return self


def real(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return method(*arguments, **options)

    return wrapped


def static_shapes(_schedule: Any, stages: Any, *_: Any) -> None:
    """What the first exchange between the pipeline's ranks finds out."""
    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC


def simulate(experiment: Experiment, rank: int) -> dict[str, int]:
    """Bytes at the peak of a rank's step, and of its parameters, gradients and moments."""
    size, storages = experiment.world_size, Storages()
    changed = [
        (Stage, "to_empty", to_empty),
        (layout, "copy_shard_", lambda *_: None),
        (layout, "initial_value", lambda *_: None),
        *((module, "float32_product", lambda a, b: torch.empty(a.shape[0], b.shape[1])) for module in (loss, ops)),
        *((DeviceMesh, name, real(getattr(DeviceMesh, name))) for name in MESH_METHODS if hasattr(DeviceMesh, name)),
    ]
    for module, name in product((_fsdp_param, _fsdp_param_group), ("alloc_storage", "free_storage")):
        if hasattr(module, name):
            changed.append((module, name, storages.counting(getattr(module, name))))
    with ExitStack() as stack:
        # as on a GPU: the small parts for a CPU's cache take minutes to simulate
        stack.enter_context(patch.dict(EAGER_ELEMENTS, cpu=EAGER_ELEMENTS["cuda"]))
        if size > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
            stack.callback(dist.destroy_process_group)
        for owner, name, value in changed:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(patch.object(schedules._PipelineSchedule, "_warmup_p2p", static_shapes, create=True))
        mesh = layout.make_mesh(experiment.parallel, "cpu")
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(storages)
        session = open_session(experiment, World(rank, size, ALONE.device), mesh)
        tokens = torch.zeros((experiment.train.micro_batch_size, experiment.model.seq_len), dtype=torch.long)
        batches = [
            Batch(tokens.clone(), tokens.clone(), None, None, tokens.numel()) for _ in range(experiment.accumulation)
        ]
        for _ in range(2):  # the first step allocates buffers
            gc.collect()
            storages.peak = storages.held
            run_micro_batches(session, batches, 1.0, train=True)
            parameters = list(session.parameters.values())
            gradients = allocated(parameter.grad for parameter in parameters)
            sync_gradients(session.parameters, mesh, experiment.parallel.sequence_parallel)
            session.optimizer.step(1e-4, torch.ones(()))
            session.optimizer.zero_grad()
        moments = [session.optimizer.state[each][name] for each in parameters for name in ("exp_avg", "exp_avg_sq")]
        return {
            "parameters": allocated(parameters),
            "gradients": gradients,
            "optimizer": allocated(moments),
            "peak": storages.peak,
        }


def allocated(tensors: Iterable[Any]) -> int:
    """Bytes of the shards of this rank; reduced gradients share their storages."""
    storages = [local_shard(tensor).untyped_storage() for tensor in tensors]
    return sum({each._cdata: each.nbytes() for each in storages}.values())
