"""What a checkpoint says about itself: manifest.json, written last.

A vocabulary that is not the packaged one is copied to RUN/tokenizer, so that a run's folder can be moved: the manifest
names the copies, relative to RUN.
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from common.errors import CheckpointError, InputError
from common.files import atomic_path, read_json
from common.settings import ModelRun, ParallelSettings, TokenizeSettings
from training.checkpoint.files import THREADS
from training.checkpoint.replicas import Replicas
from training.model import padded_vocab_size
from training.plan import Plan

FORMAT = 1
NAME = "manifest.json"
_DIGESTS: dict[str, Callable[[], Any]] = {"xxh3": xxhash.xxh3_128, "sha256": hashlib.sha256}
_VOCABULARY = {"encoder_json": "tokenizer/encoder.json", "vocab_bpe": "tokenizer/vocab.bpe"}


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    iteration: int
    """Optimiser steps done."""
    consumed_samples: int
    """Samples of the training order used up."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """What `training.watch.guard` remembers."""


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
    """`{"size": bytes, "sha256": hex, "xxh3": hex}` by file name; the last one is absent from old ones."""


def describe(
    progress: Progress, plan: Plan, tokenize: TokenizeSettings, replicas: Replicas, files: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of manifest.json."""
    run = plan.run
    return {
        "format": FORMAT,
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "guard": progress.guard,
        "vocab_size": run.model.vocab_size,
        "padded_vocab_size": padded_vocab_size(run.model.vocab_size, run.parallel.tensor),
        "model": run.model.model_dump(mode="json"),
        "parallel": run.parallel.model_dump(mode="json"),
        "train": run.train.model_dump(mode="json"),
        "tokenize": tokenize.model_dump(mode="json"),
        "data": plan.train.identity,
        "topology": topology(run.parallel),
        "replicas": {"compared": replicas.compared, "drifted": replicas.drifted},
        "torch": torch.__version__,
        "files": files,
    }


def topology(parallel: ParallelSettings) -> dict[str, Any]:
    """Which rank had which place: coordinates are (pp, dp, tp) by rank, tensor-parallel ranks are adjacent."""
    pipeline, data, tensor = sizes = (parallel.pipeline, parallel.data, parallel.tensor)
    places = [[pp, dp, tp] for pp in range(pipeline) for dp in range(data) for tp in range(tensor)]
    return {"world_size": len(places), "axes": ["pp", "dp", "tp"], "sizes": sizes, "coordinates": places}


def keep_vocabulary(run_folder: Path, tokenize: TokenizeSettings) -> TokenizeSettings:
    """Copy the two files into a run's folder, unless they are there; the settings with the copies' relative paths."""
    copies: dict[str, Path] = {}
    for key, name in _VOCABULARY.items():
        original, copy = getattr(tokenize, key), run_folder / name
        if original is not None and (copy.exists() or original.is_file()):
            copies[key] = Path(name)
            if not copy.exists():
                with atomic_path(copy) as temporary:
                    shutil.copyfile(original, temporary)
    return tokenize.model_copy(update=copies)


def _kept_vocabulary(run_folder: Path, tokenize: TokenizeSettings) -> TokenizeSettings:
    """The settings with paths of the copies, as seen from here."""
    copies = {key: run_folder / name for key, name in _VOCABULARY.items() if getattr(tokenize, key) == Path(name)}
    return tokenize.model_copy(update=copies)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of one checkpoint; CheckpointError when it has none, or one that this version cannot read."""
    path = folder / NAME
    try:
        raw = read_json(path)
    except (InputError, OSError):
        raise CheckpointError(f"{folder}: not a complete checkpoint (no readable {NAME})") from None
    if raw.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {raw.get('format')}, this version reads format {FORMAT}")
    try:
        return Manifest(
            path=folder,
            progress=Progress(raw["iteration"], raw["consumed_samples"], raw.get("guard", {})),
            run=ModelRun.model_validate({key: raw[key] for key in ("model", "parallel", "train")}),
            tokenize=_kept_vocabulary(folder.parent, TokenizeSettings.model_validate(raw["tokenize"])),
            data=raw["data"],
            files=raw["files"],
        )
    except (KeyError, ValueError) as error:
        problem = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: written by another version of this toolkit ({problem})") from None


def verify(manifest: Manifest, share: slice = slice(None), *, content: bool = True) -> None:
    """Compare files with the manifest, all of them or every nth; CheckpointError names the first that differs.

    Without `content` sizes alone are compared.
    """

    def check(name: str) -> None:
        path, expected = manifest.path / name, manifest.files[name]
        try:
            with path.open("rb") as file:
                intact = path.stat().st_size == expected["size"]
                if intact and content:
                    kind = "xxh3" if "xxh3" in expected else "sha256"
                    intact = hashlib.file_digest(file, _DIGESTS[kind]).hexdigest() == expected[kind]
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing from its checkpoint") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        if not intact:
            raise CheckpointError(f"{path}: damaged (size or checksum differs from {NAME})")

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(check, sorted(manifest.files)[share]):
            pass
