"""Bytes that a training step moves on a GPU, from the code that torch.compile generates.

    print(ledger("345m", micro_batch=16, dropout=0.0, tensor=1, kernels=True))

Nothing runs: the trainer's own model, in its own layout, is compiled for an H100 on fake tensors,
with fake tensor-parallel ranks. Each kernel's bytes, also of our own kernels, are Inductor's count
of what it reads and writes. Matrix products, attention and collectives are left out: other things
limit their time. AdamW's bytes are counted by hand. Needs g++ and a process that has not imported
torch yet; takes some ten seconds.
"""

import ctypes
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from benchmarks.harness import Row
from benchmarks.step import SIZES
from common.errors import ToolkitError
from common.settings import ModelSettings, ParallelSettings, TrainSettings
from training.parallel.sizes import padded_vocab_size, with_padded_vocabulary
from training.planning.speed import flops_per_token

if TYPE_CHECKING:
    import torch

_PRODUCTS = ("mm", "attention", "_c10d_functional")
_H100 = {
    "name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "total_memory": 80 * 2**30, "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
    "warp_size": 32, "shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472, "L2_cache_size": 50 * 2**20, "gcnArchName": "",
}  # fmt: skip
PEAK = 989e12  # FLOP/s of an H100 or H200 in bfloat16
BANDWIDTHS = {"H100": 2.9e12, "H200": 4.0e12}
"""Bytes per second that kernels reach: assumed."""
RATES = (540e12, 650e12)
"""FLOP/s that products reach, slowest and fastest: assumed."""
_ATTENTION = 330e12  # FLOP/s at head size 64, of the causal half
_SAMPLES = 512  # per optimiser step


class Graph(NamedTuple):
    """One generated graph, forward or backward."""

    moved: int
    """Bytes read and written, without products."""
    returned: list[tuple["torch.dtype", int]]
    """Type and elements of the returned tensors: what the backward graph needs."""


class _NotRun(Exception):
    """Raised instead of running a generated graph."""


def pretend() -> None:
    """Pretend a GPU in this process. Raises ToolkitError without g++ or if torch is loaded."""
    if "torch" in sys.modules:
        raise ToolkitError("benchmarks.ledger: torch is loaded already; run it in a new process")
    torch_folder = Path(*(find_spec("torch").submodule_search_locations or ()))  # type: ignore[union-attr]
    with TemporaryDirectory() as folder:
        library = Path(folder, "pretended_gpu.so")
        words = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", "-o", str(library)]
        words += [str(Path(__file__).with_name("pretended_gpu.cpp")), f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10"]
        try:
            subprocess.run([*words, f"-Wl,-rpath,{torch_folder}/lib"], check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise ToolkitError("g++ not found; it compiles benchmarks/pretended_gpu.cpp") from None
        pretended = ctypes.CDLL(str(library))
    import torch

    pretended.register_guard()
    device = SimpleNamespace(**_H100)
    answers = {
        "is_available": True, "is_initialized": False, "device_count": 1, "current_device": 0, "_lazy_init": None,
        "get_device_properties": device, "get_device_capability": (9, 0), "is_bf16_supported": True,
        "current_stream": SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=1),
        "set_rng_state": None, "is_current_stream_capturing": False, "synchronize": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, mock.Mock(return_value=answer))
    torch.cuda.get_rng_state = lambda *_: torch.empty(16, dtype=torch.uint8)
    for name in ("device", "_DeviceGuard"):
        setattr(torch.cuda, name, nullcontext)
    torch.accelerator.current_accelerator = lambda *_, **__: None
    import torch._inductor.scheduler  # reads torch.cuda when it is imported
    import torch._subclasses.fake_tensor

    setattr(torch._subclasses.fake_tensor, "init_gpu_context", lambda *_: None)  # noqa: B010

    # Triton would write the kernels; here they are only planned
    setattr(torch._inductor.scheduler, "has_triton", lambda *_: True)  # noqa: B010


def graphs(run: Callable[[], object]) -> list[Graph]:
    """The graphs that a call of compiled functions would run, forward before backward."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.fx_passes import fuse_attention, pad_mm
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import NoneAsConstantBuffer

    recorded: list[Graph] = []

    def record(graph: Any) -> Any:
        graph.init_wrapper_code()
        graph._update_scheduler()
        moved = sum(node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes if not _is_product(node.node))
        outputs = [each for each in graph.graph_outputs if not isinstance(each, NoneAsConstantBuffer)]
        own = [each for each in outputs if each.get_name() not in graph.graph_input_names]
        recorded.append(Graph(moved, [(each.get_dtype(), int(each.get_numel())) for each in own]))
        return SimpleNamespace(call=_refuse, __file__="", __name__="", key="", cache_path=None)

    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # Inductor's own
        patch = torch._inductor.config.patch
        stack.enter_context(patch(fx_graph_cache=False, compile_threads=1, joint_graph_constant_folding=False))
        options: dict[str, Any] = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
        stack.enter_context(torch._functorch.config.patch(**options))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", record))
        for module, name in ((fuse_attention, "_sfdp_init"), (pad_mm, "_pad_mm_init")):  # they would run operations
            stack.enter_context(mock.patch.object(module, name, lambda *_, **__: None))
        with suppress(_NotRun):
            run()
    return recorded


def _refuse(_arguments: object) -> None:
    raise _NotRun


def _is_product(operation: Any) -> bool:
    name = str(getattr(operation, "python_kernel_name", None) or getattr(operation, "op_overload", ""))
    return any(word in name for word in _PRODUCTS)


def ledger(size: str, micro_batch: int, dropout: float, tensor: int, kernels: bool) -> dict[str, Any]:
    """GB that one rank moves: a layer, embedding and loss of a micro-batch; their sum; AdamW.

    `kept`: what a micro-batch keeps for its backward pass. The predictions are for one GPU and 512
    samples per step.
    """
    pretend()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from training.kernels import library, ops
    from training.loss import LossHead
    from training.model import GPT2
    from training.parallel.dtensor import local_shard
    from training.parallel.layout import make_mesh, parallelize
    from training.parallel.pipeline import Stage

    model = SIZES[size].model.model_copy(update={"dropout": dropout})
    parallel, train = ParallelSettings(tensor=tensor), TrainSettings(iterations=1, micro_batch_size=micro_batch)
    if tensor > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor)
    if kernels:
        library._devices = frozenset({"cuda"})  # without loading the library
        library.select(library.KERNELS)
    # without a device PyTorch would choose separate products
    ops.attention = lambda *inputs: torch.ops.aten._scaled_dot_product_flash_attention(*inputs, True)[0]
    device, mesh = torch.device("cuda"), make_mesh(parallel, "cuda")
    with FakeTensorMode(allow_non_fake_inputs=True):
        with device:
            network = GPT2(with_padded_vocabulary(model.model_copy(update={"n_layer": 1}), tensor), torch.bfloat16)
            network.head = LossHead(model.vocab_size)  # type: ignore[assignment]
        stage = Stage(network, range(1))
        parallelize(stage, mesh, parallel, train, device)
        hidden = torch.empty(micro_batch, model.seq_len, model.n_embd, dtype=torch.bfloat16, device=device)
        tokens = torch.empty(micro_batch, model.seq_len, dtype=torch.long, device=device)
        hidden.requires_grad_()
        parts = {
            "block": graphs(lambda: stage.model.h["0"](hidden)),
            "embedding": graphs(lambda: stage.embed(tokens, None)),
            "loss": graphs(lambda: stage.loss(hidden, tokens, torch.ones(micro_batch, device=device))),
        }
    layers = {name: model.n_layer if name.startswith("h.") else 1 for name, _ in network.named_parameters()}
    held = sum(layers[name] * local_shard(each).numel() for name, each in network.named_parameters())
    multiplied = sum(
        layers[name] * local_shard(each).numel() for name, each in network.named_parameters() if each.dim() > 1
    )
    # bytes per parameter: norm 4, AdamW 28, without our kernel another pass for clipping; matrices
    # are rounded once
    optimizer = (32 if kernels else 40) * held + 6 * multiplied
    moved = {name: sum(graph.moved for graph in both) for name, both in parts.items()}
    kept = {name: sum(dtype.itemsize * count for dtype, count in both[0].returned) for name, both in parts.items()}
    step, all_kept = (each["embedding"] + model.n_layer * each["block"] + each["loss"] for each in (moved, kept))
    logits = micro_batch * model.seq_len * padded_vocab_size(model.vocab_size, tensor) // tensor
    return {
        "size": size, "micro batch": micro_batch, "dropout": dropout, "tensor": tensor,
        "kernels": "on" if kernels else "off",
        **{name: value / 1e9 for name, value in moved.items()},
        "optimizer": optimizer / 1e9, "step": step / 1e9, "kept": all_kept / 1e9,
        "kept_float32_vocabulary": any(
            dtype == torch.float32 and count >= logits for both in parts.values() for dtype, count in both[0].returned
        ),
        **(_predictions(model, micro_batch, step, optimizer, held) if tensor == 1 else {}),
    }  # fmt: skip


def _predictions(model: ModelSettings, micro_batch: int, step: int, optimizer: int, parameters: int) -> dict[str, Any]:
    """Tokens per second and MFU by GPU, with the slowest and the fastest rate of products."""
    tokens, accumulation = micro_batch * model.seq_len, _SAMPLES / micro_batch
    attention = 6 * model.n_layer * model.seq_len * model.n_embd * tokens
    products = flops_per_token(model) * tokens - 2 * attention  # the convention also counts the masked half
    moved = step + 12 * parameters * (1 - 1 / accumulation) + optimizer / accumulation  # gradients are summed
    figures = {}
    for gpu, bandwidth in BANDWIDTHS.items():
        speeds = [tokens / (products / rate + attention / _ATTENTION + moved / bandwidth) for rate in RATES]
        figures[f"{gpu} tokens/s"] = tuple(round(speed, -2) for speed in speeds)
        figures[f"{gpu} MFU %"] = tuple(round(100 * speed * flops_per_token(model) / PEAK, 1) for speed in speeds)
    return figures


def measure(arguments: Namespace) -> Iterator[Row]:
    """GB that a compiled step moves on a GPU, without products; no GPU is needed."""
    size, tensor = arguments.size, arguments.tensor
    if (heads := SIZES[size].model.n_head) % tensor:
        raise ToolkitError(f"parallel.tensor {tensor} does not divide the {heads} heads of {size}; choose a divisor")
    options = arguments.micro_batch, arguments.dropout, tensor, arguments.kernels == "on"
    yield ledger(size, *options)
