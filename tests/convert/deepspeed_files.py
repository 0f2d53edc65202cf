"""Write DeepSpeed's files from the layout tables, without deepspeed and our readers.

Model files hold the weights rounded to bfloat16, optimizer files the float32 ones, so that a test
sees which were read.
"""

import enum
import math
import sys
import types
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from convert.sources.source import Architecture
from tests.convert import megatron_files
from tests.convert.encoded import SMALL, truth
from tests.convert.megatron_files import ENCODER_LAYER, Layout, nested, recorded_args, shard

VERSION, ITERATION, SAMPLES, STEP = "0.19.8", 120, 1920, 118
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """How a checkpoint was made."""

    stage: int = 2
    tensor: int = 1
    data: int = 2
    names: str = "transformers"
    """Or `megatron`."""
    version: int | None = 2
    """Megatron's checkpoint_version: the order of the qkv rows."""
    pipeline: int = 0
    """Stages of a pipeline module; 0 for none."""
    bf16_optimizer: bool = False
    """DeepSpeed's BF16_Optimizer: other keys, no trimmed padding, another file name."""
    frozen: tuple[str, ...] = ()
    """Keys of weights that were not trained."""
    model: Architecture = SMALL

    @property
    def megatron(self) -> bool:
        return self.names != "transformers"


def write_tag(folder: Path, run: Run) -> Path:
    """The files of a save in `folder`, which is made."""
    folder.mkdir(parents=True)
    with deepspeed_classes():
        for stage, ranks in enumerate(rank_tensors(run)):
            for rank, tensors in enumerate(ranks):
                _write_rank(folder, run, stage * run.tensor + rank, tensors)
    if run.pipeline:
        write_layers(folder, run)
    return folder


def write_layers(folder: Path, run: Run) -> None:
    """Layer files: module 1 is the embedding, 3 and up are the blocks, then a gap, and the norm."""
    for rank, tensors in enumerate(split(run)):
        modules: defaultdict[int, Tensors] = defaultdict(dict)
        for name, tensor in tensors.items():
            key = pipeline_key(name, run.model.n_layer).replace("tied_modules.embed", "1")
            number, _, key = key.partition(".")
            modules[int(number)][key] = tensor.bfloat16()
        for module, content in modules.items():
            torch.save(content, folder / f"layer_{module:02d}-model_{rank:02d}-model_states.pt")


def rank_tensors(run: Run) -> list[list[Tensors]]:
    """Float32 tensors by key: per pipeline stage (one without a pipeline), then per tensor rank."""
    ranks = split(run)
    if not run.pipeline:
        return [[{key_of(name, run): tensor for name, tensor in rank.items()} for rank in ranks]]
    return [[_of_stage(rank, stage, run) for rank in ranks] for stage in range(run.pipeline)]


def _of_stage(tensors: Tensors, stage: int, run: Run) -> Tensors:
    """Both embeddings are in the first and last stage; the last one's positions are not trained."""
    per_stage, last, kept = run.model.n_layer // run.pipeline, run.pipeline - 1, {}
    for name, tensor in tensors.items():
        homes = {0, last} if name in ("wte.weight", "wpe.weight") else {last}
        if name.startswith("h."):
            homes = {int(name.split(".")[1]) // per_stage}
        if stage in homes:
            stale = name == "wpe.weight" and stage > 0
            kept[pipeline_key(name, run.model.n_layer)] = tensor * 0 if stale else tensor
    return kept


def key_of(name: str, run: Run) -> str:
    """The key of a tensor in the model's state dict."""
    if run.megatron:
        return megatron_files.key_of(name, "encoder")
    return name if name == "lm_head.weight" else f"transformer.{name}"


def pipeline_key(name: str, n_layer: int) -> str:
    """The key of a tensor in a pipeline: modules by number, the tied module by name."""
    if name in ("wte.weight", "wpe.weight"):
        return f"tied_modules.embed.{'word' if name == 'wte.weight' else 'position'}_embeddings.weight"
    if name.startswith("ln_f"):
        return f"{3 + n_layer + 1}.{name[5:]}"
    _, layer, *stem, kind = name.split(".")
    return f"{3 + int(layer)}.{ENCODER_LAYER['.'.join(stem)]}.{kind}"


def split(run: Run) -> list[Tensors]:
    """Our names in the run's layout: Megatron's shards, or transformers' [in, out]."""
    layout = Layout(version=run.version if run.megatron else 0, tensor=run.tensor, model=run.model)
    return [
        {name: _shard(name, whole, layout, rank, run) for name, whole in truth(run.model).items()}
        for rank in range(run.tensor)
    ]


def _shard(name: str, whole: Tensor, layout: Layout, rank: int, run: Run) -> Tensor:
    if not run.megatron and name in ("wte.weight", "lm_head.weight"):
        return whole.chunk(run.tensor)[rank]
    part = shard(name, whole, layout, rank)
    return part.t().contiguous() if part.dim() == 2 and name != "wpe.weight" and not run.megatron else part


def partition(tensors: Sequence[Tensor], stage: int, ranks: int, lean: bool = True) -> list[Tensor]:
    """A group's flat partitions; in stages 1 and 2 `lean` cuts the padding off."""
    if stage == 3:
        shares = [_padded(tensor, -tensor.numel() % ranks).chunk(ranks) for tensor in tensors]
        return [torch.cat([share[rank] for share in shares]) for rank in range(ranks)]
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    size = math.ceil(len(whole) / (2 * ranks)) * 2
    whole = whole if lean else _padded(whole, size * ranks - len(whole))
    return [whole[rank * size : (rank + 1) * size] for rank in range(ranks)]


def _padded(tensor: Tensor, count: int) -> Tensor:
    return torch.cat([tensor.flatten(), torch.full((count,), torch.nan)])


def rounded(model: Architecture = SMALL) -> Tensors:
    """What the model files hold."""
    return {name: tensor.bfloat16().float() for name, tensor in truth(model).items()}


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Write a .pt file again with a change that is made in place."""
    with deepspeed_classes():
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


def inside(pattern: str, change: Callable[[Any], object]) -> Callable[[Path], object]:
    """`edit` of the files of a checkpoint whose paths in its folder match."""
    return lambda folder: [edit(path, change) for path in sorted(folder.glob(pattern))]


def _write_rank(folder: Path, run: Run, rank: int, tensors: Tensors) -> None:
    trained = {key: tensor for key, tensor in tensors.items() if key not in run.frozen}
    groups = [{key: t for key, t in trained.items() if (t.dim() > 1) == decayed} for decayed in (True, False)]
    module: Any = None if run.pipeline else {key: tensor.bfloat16() for key, tensor in tensors.items()}
    shared = {}
    if not run.megatron:
        shared = {"lm_head.weight": "transformer.wte.weight"} if rank == 0 and run.model.tied else {}
        module.setdefault("lm_head.weight", module["transformer.wte.weight"])
        module["transformer.h.0.attn.bias"] = torch.ones(4, 4).tril().bool()
    elif module is not None:
        module = nested(module)
    state = {
        "module": module,
        "global_steps": ITERATION,
        "global_samples": SAMPLES,
        "dp_world_size": run.data,
        "mp_world_size": run.tensor * max(run.pipeline, 1),
        "ds_config": {"train_batch_size": 16},
        "ds_version": VERSION,
        "param_shapes": [{key: tensor.shape for key, tensor in group.items()} for group in groups],
        "shared_params": shared,
    }
    if not run.stage:
        state |= {"param_shapes": None, "shared_params": None}
    if run.megatron:
        state |= {} if run.version is None else {"checkpoint_version": float(run.version)}
        recorded = recorded_args(Layout(version=2.0, tensor=run.tensor, model=run.model))
        del recorded["pipeline_model_parallel_size"]
        state["args"] = Namespace(**recorded | {"consumed_train_samples": SAMPLES})
    if run.stage < 3:
        torch.save(state, folder / f"mp_rank_{rank:02d}_model_states.pt")
    for data in range(run.data):
        if run.stage == 3:
            state["module"] = {key: torch.empty(0, dtype=torch.bfloat16) for key in tensors}
            path = folder / f"zero_pp_rank_{data}_mp_rank_{rank:02d}_model_states.pt"
            torch.save(state, path)
        if run.stage:
            prefix = "bf16_" if run.bf16_optimizer else ""
            path = folder / f"{prefix}zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt"
            torch.save(_optimizer(run, [list(group.values()) for group in groups], data), path)


def _optimizer(run: Run, groups: Sequence[Sequence[Tensor]], data: int) -> dict[str, Any]:
    def part(number: int, factor: float, lean: bool = False) -> Tensor:
        flat = partition([tensor * factor for tensor in groups[number]], run.stage, run.data, lean)
        return flat[data].clone()

    masters = [part(number, 1.0, lean=not run.bf16_optimizer) for number in range(2)]
    moments = [{"exp_avg": part(number, -1.0), "exp_avg_sq": part(number, 0.25)} for number in range(2)]  # padded
    base = {"state": {number: {"step": torch.tensor(float(STEP)), **moments[number]} for number in range(2)}}
    states: dict[str, Any] = {}
    if not run.bf16_optimizer:
        states = {"zero_stage": ZeroStageEnum(run.stage)}
    if run.stage == 3:
        states |= {"partition_count": run.data, "optimizer_state_dict": base, "fp32_flat_groups": masters}
    else:
        states |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": masters}
        states |= {"partition_count": [run.data, run.data], "ds_version": VERSION}
    return {"optimizer_state_dict": states, "ds_config": {}, "ds_version": VERSION}


class ZeroStageEnum(enum.IntEnum):
    """DeepSpeed's, in a module that cannot be imported when a file is read."""

    disabled, optimizer_states, gradients, weights = 0, 1, 2, 3


ZeroStageEnum.__module__ = "deepspeed.runtime.zero.config"


@contextmanager
def deepspeed_classes() -> Iterator[None]:
    """The module of DeepSpeed's class, and its packages, exist while a file is saved."""
    parts = ZeroStageEnum.__module__.split(".")
    modules = {name: types.ModuleType(name) for name in (".".join(parts[:end]) for end in range(1, len(parts) + 1))}
    modules[ZeroStageEnum.__module__].ZeroStageEnum = ZeroStageEnum  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, modules):
        yield
