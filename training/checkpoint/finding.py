"""Which checkpoints there are, and which one to go on from."""

import re
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.errors import CheckpointError
from training.checkpoint import manifest as manifests
from training.checkpoint.manifest import Manifest, read_manifest, verify
from training.distributed import gathered
from training.plan import Plan

_NAME = re.compile(r"iter_(\d{7,})")


def iteration_folder(run_folder: Path, iteration: int) -> Path:
    """RUN/iter_0000100."""
    return run_folder / f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int:
    """100 of RUN/iter_0000100."""
    return int(folder.name.removeprefix("iter_"))


def iterations(run_folder: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first, complete or not."""
    found = [path for path in run_folder.glob("iter_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=iteration_of, reverse=True)


def problem_of(folder: Path, group: Any = None, *, content: bool = True) -> str:
    """What is wrong with a checkpoint, or nothing; ranks share the reading (a collective call, equal on all)."""
    problem = ""
    try:
        share = slice(dist.get_rank(group), None, dist.get_world_size(group)) if dist.is_initialized() else slice(None)
        verify(read_manifest(folder), share, content=content)
    except CheckpointError as error:
        problem = str(error)
    return next(filter(None, gathered(problem, group)), "")


def newest(run_folder: Path) -> Manifest | None:
    """The newest checkpoint of a run that passes `verify`; the ones it passes over are named on stderr.

    A collective call: ranks share the reading and agree on the answer. None where there is no complete checkpoint.
    """
    for folder in gathered(iterations(run_folder))[0]:  # rank 0's list: a network folder may look different elsewhere
        problem = problem_of(folder)
        if not problem:
            return read_manifest(folder)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"warning: checkpoint passed over: {problem}", file=sys.stderr)
    return None


def at(path: Path) -> Manifest:
    """The checkpoint that a person means by `path`: an iteration folder, or a run's newest complete one.

    Raises CheckpointError in one line for anything else, Megatron's `mp_rank_*` folders among it.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if path.name.startswith("mp_rank_") or next(path.glob("mp_rank_*"), next(path.glob("*/mp_rank_*"), None)):
        raise CheckpointError(f"{path}: a Megatron checkpoint (mp_rank_*); these are not read yet")
    if _NAME.fullmatch(path.name.removesuffix(".tmp")) or (path / manifests.NAME).exists():
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
