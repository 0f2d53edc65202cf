"""Checkpoints that are whole or absent, and fit every layout.

    RUN/iter_0000100/   __0_0.distcp …   tensors, written by all ranks (torch.distributed.checkpoint)
                        .metadata        where each tensor lies in them
                        manifest.json    written last: sizes, sha256, settings, position in the data
    RUN/latest          the name of the newest one, for people and scripts

Tensors are `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` and `step`, all with the true vocabulary rows only: padding
belongs to a layout and is rebuilt on load. There is no random state to keep: dropout and data order are pure functions
of seed and position. A checkpoint is written under a `.tmp` name and renamed when its manifest is on disk.
"""

import hashlib
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from common.errors import CheckpointError, InputError
from common.files import fsync, read_json, write_json, write_text
from common.settings import ModelRun, TokenizeSettings
from training.distributed import gathered
from training.model import GPT2, padded_vocab_size
from training.plan import Plan
from training.tensors import place, plain, true_shape

Parameters = Mapping[str, nn.Parameter]

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    iteration: int
    """Optimiser steps done."""
    consumed_samples: int
    """Samples of the training order used up."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """What `training.guard` remembers."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself."""

    path: Path
    progress: Progress
    run: ModelRun
    tokenize: TokenizeSettings
    data: str
    """`Blend.identity` of what it was trained on."""
    files: Mapping[str, Mapping[str, Any]]
    """`{"size": bytes, "sha256": hex}` by file name."""


def iteration_folder(run_folder: Path, iteration: int) -> Path:
    """RUN/iter_0000100."""
    return run_folder / f"iter_{iteration:07d}"


# ------------------------------------------------------------------------------------------------ tensors


def _tensors(parameters: Parameters, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The live tensors of a run by their names in a checkpoint, padding rows still on."""
    tensors: dict[str, Tensor] = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        tensors |= {f"{moment}.{name}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
        tensors["step"] = state["step"]  # equal for all parameters
    return tensors


def _without_padding(key: str, tensor: Tensor, vocab_size: int) -> torch.Size:
    return true_shape(key.partition(".")[2], tensor, vocab_size)


def _spread(whole: Tensor, like: Tensor) -> Tensor:
    """`whole` cut along the last axis of `like`'s mesh, equal along the others: every rank holds some of its rows."""
    if isinstance(like, DTensor):
        placements = [*([Replicate()] * (like.device_mesh.ndim - 1)), Shard(0)]
        return distribute_tensor(whole, like.device_mesh, placements, src_data_rank=None)
    return whole


def save(
    run_folder: Path, parameters: Parameters, optimizer: torch.optim.Optimizer, progress: Progress, plan: Plan
) -> Path:
    """Write one checkpoint (a collective call) and return its folder; an older one of that iteration is replaced.

    `parameters` are those of this process, by name.
    """
    run = plan.run
    final = iteration_folder(run_folder, progress.iteration)
    temporary = final.with_name(final.name + ".tmp")
    rank = _rank()
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)  # of a save that was killed
        temporary.mkdir(parents=True)
    _barrier()
    tensors = _tensors(parameters, optimizer)
    for key, tensor in tensors.items():
        shape = _without_padding(key, tensor, run.model.vocab_size)
        if shape != tensor.shape:
            tensors[key] = _spread(plain(tensor)[: shape[0]], tensor)
    with _without_process_group_warning():
        state_dict_saver.save(tensors, checkpoint_id=temporary, no_dist=not dist.is_initialized())
    _barrier()
    files = _digests(temporary)
    if rank == 0:
        manifest = {
            "format": FORMAT,
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "guard": progress.guard,
            "vocab_size": run.model.vocab_size,
            "padded_vocab_size": padded_vocab_size(run.model.vocab_size, run.parallel.tensor),
            "model": run.model.model_dump(mode="json"),
            "parallel": run.parallel.model_dump(mode="json"),
            "train": run.train.model_dump(mode="json"),
            "tokenize": plan.tokenize.model_dump(mode="json"),
            "data": plan.train.identity,
            "torch": torch.__version__,
            "files": files,
        }
        write_json(temporary / MANIFEST, manifest)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        fsync(run_folder)
        write_text(run_folder / "latest", final.name + "\n")
    _barrier()
    return final


def load(manifest: Manifest, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Fill the parameters and moments of this process, in whatever layout, from a checkpoint (a collective call)."""
    live = _tensors(parameters, optimizer)
    target = dict(live)
    for key, tensor in live.items():
        shape = _without_padding(key, tensor, manifest.run.model.vocab_size)
        if shape != tensor.shape:
            target[key] = _spread(torch.empty(shape, dtype=tensor.dtype, device=tensor.device), tensor)
    with _without_process_group_warning():
        state_dict_loader.load(target, checkpoint_id=manifest.path, no_dist=not dist.is_initialized())
    for key, tensor in live.items():
        if target[key] is not tensor:
            place(tensor, plain(target[key]))
    for parameter in parameters.values():
        optimizer.state[parameter]["step"].copy_(live["step"])


def read_weights(manifest: Manifest) -> dict[str, Tensor]:
    """The whole model of a checkpoint of any layout, in this process alone: {name: float32 tensor}, true vocabulary."""
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in GPT2(manifest.run.model).named_parameters()}
    tensors: dict[str, Any] = {f"model.{name}": torch.empty(shape) for name, shape in shapes.items()}
    with _without_process_group_warning():
        state_dict_loader.load(tensors, checkpoint_id=manifest.path, no_dist=True)
    return {key.removeprefix("model."): tensor for key, tensor in tensors.items()}


# ------------------------------------------------------------------------------------------------ finding them


def read_manifest(folder: Path) -> Manifest:
    """The manifest of one checkpoint; CheckpointError when it has none, or one that this version cannot read."""
    path = folder / MANIFEST
    try:
        raw = read_json(path)
    except InputError:
        raise CheckpointError(f"{folder}: not a complete checkpoint (no readable {MANIFEST})") from None
    if raw.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {raw.get('format')}, this version reads format {FORMAT}")
    try:
        return Manifest(
            path=folder,
            progress=Progress(raw["iteration"], raw["consumed_samples"], raw.get("guard", {})),
            run=ModelRun.model_validate({key: raw[key] for key in ("model", "parallel", "train")}),
            tokenize=TokenizeSettings.model_validate(raw["tokenize"]),
            data=raw["data"],
            files=raw["files"],
        )
    except (KeyError, ValueError) as error:
        problem = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: written by another version of this toolkit ({problem})") from None


def verify(manifest: Manifest, share: slice = slice(None)) -> None:
    """Compare files with the manifest, all of them or every nth; CheckpointError names the first that differs."""
    for name, expected in sorted(manifest.files.items())[share]:
        path = manifest.path / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing from its checkpoint")
        if path.stat().st_size != expected["size"] or _sha256(path) != expected["sha256"]:
            raise CheckpointError(f"{path}: damaged (size or sha256 differs from {MANIFEST})")


def iterations(run_folder: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first, complete or not."""
    found = [path for path in run_folder.glob("iter_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("iter_")), reverse=True)


def newest(run_folder: Path) -> Manifest | None:
    """The newest checkpoint of a run that passes `verify`; the ones it passes over are named on stderr.

    A collective call: ranks share the reading and agree on the answer. None where there is no complete checkpoint.
    """
    rank, size = _rank(), _size()
    for folder in gathered(iterations(run_folder))[0]:  # rank 0's list: a network folder may look different elsewhere
        problem = ""
        manifest: Manifest | None = None
        try:
            manifest = read_manifest(folder)
            verify(manifest, slice(rank, None, size))
        except CheckpointError as error:
            problem = str(error)
        problems: list[str] = gathered(problem)
        if manifest is not None and not any(problems):
            return manifest
        if rank == 0:
            print(f"warning: checkpoint passed over: {next(filter(None, problems))}", file=sys.stderr)
    return None


def at(path: Path) -> Manifest:
    """The checkpoint that a person means by `path`: an iteration folder, or a run's newest complete one.

    Raises CheckpointError in one line for anything else, Megatron's `mp_rank_*` folders among it.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if path.name.startswith("mp_rank_") or next(path.glob("mp_rank_*"), next(path.glob("*/mp_rank_*"), None)):
        raise CheckpointError(f"{path}: a Megatron checkpoint (mp_rank_*); these are not read yet")
    if _NAME.fullmatch(path.name.removesuffix(".tmp")) or (path / MANIFEST).exists():
        manifest = read_manifest(path)
        verify(manifest)
        return manifest
    if not iterations(path):
        raise CheckpointError(f"{path}: no checkpoint here (a run folder holds iter_0000100 or the like)")
    found = newest(path)
    if found is None:
        raise CheckpointError(f"{path}: no complete checkpoint here; train on, a new one will be written")
    return found


def check_fits(manifest: Manifest, plan: Plan) -> None:
    """CheckpointError when going on from a checkpoint would train another model, or on another order of data."""
    if manifest.data != plan.train.identity:
        held = " and ".join(str(part.corpus.prefix) for part in plan.train.parts)
        blended = " (or on other weights)" if len(plan.train.parts) > 1 else ""
        raise CheckpointError(
            f"{manifest.path}: was trained on another dataset than {held} holds now{blended}; "
            f"train under another name, or remove {manifest.path.parent} to begin anew"
        )
    # What may change in the middle of a run is left out: dropout, layout, batch, learning rate, length.
    fixed = [("model", key) for key in ("n_layer", "n_head", "n_embd", "seq_len", "vocab_size")]
    for section, key in (*fixed, ("train", "seed"), ("train", "split")):
        saved, wanted = (getattr(getattr(run, section), key) for run in (manifest.run, plan.run))
        if saved != wanted:
            raise CheckpointError(
                f"{manifest.path}: models.{plan.name}.{section}.{key} is {wanted} in the configuration, but the "
                f"checkpoint has {saved}; set it back, or train under another name"
            )


# ------------------------------------------------------------------------------------------------ helpers


@contextmanager
def _without_process_group_warning() -> Iterator[None]:
    """The library warns when one process works alone, even when `no_dist` says that it is meant to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file in `folder`; ranks share the reading (a collective call)."""
    names = sorted(path.name for path in folder.iterdir())
    mine = {
        name: {"size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
        for name in names[_rank() :: _size()]
    }
    return {name: digest for part in gathered(mine) for name, digest in sorted(part.items())}
