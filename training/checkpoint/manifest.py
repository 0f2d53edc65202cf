"""A checkpoint's manifest.json, written last: progress, settings, identity of the data, and the hash of every file.

A vocabulary other than the packaged one is copied to MODEL_FOLDER/tokenizer, so that a model folder can be moved: the
manifest names the copies relative to it.
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
from pydantic import BaseModel

from common.errors import CheckpointError, CheckpointVersionError, InputError
from common.files import atomic_path, read_json
from common.settings import Experiment, ModelSettings, ParallelSettings, Section, TokenizeSettings, TrainSettings
from training.checkpoint.replicas import Replicas
from training.checkpoint.storage import THREADS
from training.checkpoint.versions import FORMAT, read_section
from training.dataset.blend import Blend
from training.parallel.vocabulary import padded_vocab_size

MANIFEST = "manifest.json"
_HASHES: dict[str, Callable[[], Any]] = {"xxh3": xxhash.xxh3_128, "sha256": hashlib.sha256}
_SECTIONS: dict[str, type[Section]] = {"model": ModelSettings, "parallel": ParallelSettings, "train": TrainSettings}
_VOCABULARY = {"encoder_json": "tokenizer/encoder.json", "vocab_bpe": "tokenizer/vocab.bpe"}


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    iteration: int
    """Optimiser steps done."""
    consumed_samples: int
    """Position in the training order."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """State of `training.monitoring.guard`."""
    journal: Mapping[str, Any] = field(default_factory=dict)
    """State of `training.metrics`: figures not reported yet."""


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.json."""

    path: Path
    """The checkpoint's folder."""
    progress: Progress
    experiment: Experiment
    tokenize: TokenizeSettings
    data: str
    """`Blend.identity` of the training data."""
    content: list[str] | None
    """`Blend.content` of the training data; None in manifests that predate this key."""
    files: Mapping[str, Mapping[str, Any]]
    """`{"size": bytes, "xxh3": hex}` by file name; older manifests have sha256 in addition or instead."""
    end_of_text: int | None = None
    """Id of the token that ends a document; None in manifests that predate this key."""


class _File(BaseModel):
    size: int
    sha256: str | None = None
    xxh3: str | None = None


class _Raw(BaseModel):
    """The types of all keys but the settings; unknown keys are ignored."""

    iteration: int
    consumed_samples: int
    guard: dict[str, Any] = {}
    journal: dict[str, Any] = {}
    data: str
    content: list[str] | None = None
    end_of_text: int | None = None
    files: dict[str, _File]


def manifest_content(
    progress: Progress,
    experiment: Experiment,
    tokenize: TokenizeSettings,
    data: Blend,
    replicas: Replicas,
    files: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of manifest.json, JSON types only."""
    return {
        "format": FORMAT,
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "guard": progress.guard,
        "journal": progress.journal,
        "vocab_size": experiment.model.vocab_size,
        "padded_vocab_size": padded_vocab_size(experiment.model.vocab_size, experiment.parallel.tensor),
        "model": experiment.model.model_dump(mode="json"),
        "parallel": experiment.parallel.model_dump(mode="json"),
        "train": experiment.train.model_dump(mode="json"),
        "tokenize": tokenize.model_dump(mode="json"),
        "data": data.identity,
        "content": data.content,
        "end_of_text": data.end_of_text,
        "topology": _topology(experiment.parallel),
        "replicas": {"compared": replicas.compared, "drifted": replicas.drifted},
        "torch": torch.__version__,
        "files": files,
    }


def _topology(parallel: ParallelSettings) -> dict[str, Any]:
    """The mesh coordinates (pp, dp, tp) of each rank; tensor-parallel ranks are adjacent."""
    pipeline, data, tensor = sizes = (parallel.pipeline, parallel.data, parallel.tensor)
    coordinates = [[pp, dp, tp] for pp in range(pipeline) for dp in range(data) for tp in range(tensor)]
    return {"world_size": len(coordinates), "axes": ["pp", "dp", "tp"], "sizes": sizes, "coordinates": coordinates}


def copy_vocabulary(model_folder: Path, tokenize: TokenizeSettings) -> TokenizeSettings:
    """Copy the vocabulary files to a model folder, unless they are there; returns settings with the relative paths."""
    copies: dict[str, Path] = {}
    for key, name in _VOCABULARY.items():
        original, copy = getattr(tokenize, key), model_folder / name
        if original is not None and (copy.exists() or original.is_file()):
            copies[key] = Path(name)
            if not copy.exists():
                with atomic_path(copy) as temporary:
                    shutil.copyfile(original, temporary)
    return tokenize.model_copy(update=copies)


def _resolve_vocabulary(model_folder: Path, tokenize: TokenizeSettings) -> TokenizeSettings:
    """The settings with the copies' paths relative to the working directory."""
    paths = {key: Path(path) for key in _VOCABULARY if (path := getattr(tokenize, key)) is not None}
    copies = {key: model_folder / path for key, path in paths.items() if path == Path(_VOCABULARY[key])}
    return tokenize.model_copy(update=paths | copies)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of one checkpoint, of this version of the toolkit or another (see `versions`).

    Raises CheckpointError if it is missing or damaged, CheckpointVersionError if this version must not read it.
    """
    path = folder / MANIFEST
    try:
        raw = read_json(path)
    except (InputError, OSError):
        raise CheckpointError(f"{folder}: not a complete checkpoint (no readable {MANIFEST})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("format"), int):
        raise CheckpointError(f"{path}: not the manifest of a checkpoint; damaged")
    if raw["format"] != FORMAT:
        raise CheckpointVersionError(
            f"{path}: format {raw['format']}, this version of the toolkit reads {FORMAT}; use the one that wrote it"
        )
    try:
        found = _Raw.model_validate(raw)
        sections: dict[str, Any] = {key: read_section(kind, key, raw[key]) for key, kind in _SECTIONS.items()}
        tokenize = read_section(TokenizeSettings, "tokenize", raw["tokenize"])
    except CheckpointVersionError as error:
        raise CheckpointVersionError(f"{path}: {error}") from None
    except (KeyError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise CheckpointError(f"{path}: damaged ({problem})") from None
    return Manifest(
        path=folder,
        progress=Progress(found.iteration, found.consumed_samples, found.guard, found.journal),
        experiment=Experiment.model_construct(**sections),
        tokenize=_resolve_vocabulary(folder.parent, tokenize),
        data=found.data,
        content=found.content,
        end_of_text=found.end_of_text,
        files={name: entry.model_dump(exclude_none=True) for name, entry in found.files.items()},
    )


def verify(manifest: Manifest, share: slice = slice(None), *, content: bool = True) -> None:
    """Compare a checkpoint's files, or a share of them, with its manifest.

    Without `content` only sizes are compared. Raises CheckpointError for the first file that differs.
    """

    def check(name: str) -> None:
        path, expected = manifest.path / name, manifest.files[name]
        try:
            with path.open("rb") as file:
                intact = path.stat().st_size == expected["size"]
                if intact and content:
                    kind = "xxh3" if "xxh3" in expected else "sha256"
                    intact = hashlib.file_digest(file, _HASHES[kind]).hexdigest() == expected[kind]
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing from its checkpoint") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        if not intact:
            raise CheckpointError(f"{path}: damaged (size or checksum differs from {MANIFEST})")

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(check, sorted(manifest.files)[share]):
            pass
