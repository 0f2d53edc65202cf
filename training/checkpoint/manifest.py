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
from pydantic import BaseModel

from common.errors import CheckpointError, InputError
from common.files import atomic_path, read_json
from common.settings import Experiment, ModelSettings, ParallelSettings, Section, TokenizeSettings, TrainSettings
from training.checkpoint.files import THREADS
from training.checkpoint.replicas import Replicas
from training.checkpoint.versions import FORMAT, OtherVersion, read_section
from training.dataset.blend import Blend
from training.parallel.vocabulary import padded_vocab_size

NAME = "manifest.json"
_DIGESTS: dict[str, Callable[[], Any]] = {"xxh3": xxhash.xxh3_128, "sha256": hashlib.sha256}
_SECTIONS: dict[str, type[Section]] = {"model": ModelSettings, "parallel": ParallelSettings, "train": TrainSettings}
_VOCABULARY = {"encoder_json": "tokenizer/encoder.json", "vocab_bpe": "tokenizer/vocab.bpe"}


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    iteration: int
    """Optimiser steps done."""
    consumed_samples: int
    """Samples of the training order used up."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """What `training.monitoring.guard` remembers."""
    journal: Mapping[str, Any] = field(default_factory=dict)
    """What `training.metrics` has yet to report."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself."""

    path: Path
    progress: Progress
    experiment: Experiment
    tokenize: TokenizeSettings
    data: str
    """`Blend.identity` of what it was trained on."""
    content: list[str] | None
    """`Blend.content` of that; None in a manifest from before there was such a thing."""
    files: Mapping[str, Mapping[str, Any]]
    """`{"size": bytes, "sha256": hex, "xxh3": hex}` by file name; the last one is absent from old ones."""
    end_of_text: int | None = None
    """Id of the token that closes its documents; None in old manifests."""


class _File(BaseModel):
    size: int
    sha256: str | None = None
    xxh3: str | None = None


class _Raw(BaseModel):
    """The types of what is read, settings aside; keys of newer versions are passed over."""

    iteration: int
    consumed_samples: int
    guard: dict[str, Any] = {}
    journal: dict[str, Any] = {}
    data: str
    content: list[str] | None = None
    end_of_text: int | None = None
    files: dict[str, _File]


def describe(
    progress: Progress,
    experiment: Experiment,
    tokenize: TokenizeSettings,
    data: Blend,
    replicas: Replicas,
    files: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of manifest.json."""
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
        "topology": topology(experiment.parallel),
        "replicas": {"compared": replicas.compared, "drifted": replicas.drifted},
        "torch": torch.__version__,
        "files": files,
    }


def topology(parallel: ParallelSettings) -> dict[str, Any]:
    """Which rank had which place: coordinates are (pp, dp, tp) by rank, tensor-parallel ranks are adjacent."""
    pipeline, data, tensor = sizes = (parallel.pipeline, parallel.data, parallel.tensor)
    places = [[pp, dp, tp] for pp in range(pipeline) for dp in range(data) for tp in range(tensor)]
    return {"world_size": len(places), "axes": ["pp", "dp", "tp"], "sizes": sizes, "coordinates": places}


def keep_vocabulary(model_folder: Path, tokenize: TokenizeSettings) -> TokenizeSettings:
    """Copy the two files into a run's folder, unless they are there; the settings with the copies' relative paths."""
    copies: dict[str, Path] = {}
    for key, name in _VOCABULARY.items():
        original, copy = getattr(tokenize, key), model_folder / name
        if original is not None and (copy.exists() or original.is_file()):
            copies[key] = Path(name)
            if not copy.exists():
                with atomic_path(copy) as temporary:
                    shutil.copyfile(original, temporary)
    return tokenize.model_copy(update=copies)


def _kept_vocabulary(model_folder: Path, tokenize: TokenizeSettings) -> TokenizeSettings:
    """The settings with paths of the copies, as seen from here."""
    paths = {key: Path(path) for key in _VOCABULARY if (path := getattr(tokenize, key)) is not None}
    copies = {key: model_folder / path for key, path in paths.items() if path == Path(_VOCABULARY[key])}
    return tokenize.model_copy(update=paths | copies)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of one checkpoint, of this version of the toolkit or another (`versions`).

    Raises CheckpointError when there is none or it is damaged, OtherVersion when it must not be read by this version.
    """
    path = folder / NAME
    try:
        raw = read_json(path)
    except (InputError, OSError):
        raise CheckpointError(f"{folder}: not a complete checkpoint (no readable {NAME})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("format"), int):
        raise CheckpointError(f"{path}: not the manifest of a checkpoint; damaged")
    if raw["format"] != FORMAT:
        raise OtherVersion(
            f"{path}: format {raw['format']}, this version of the toolkit reads {FORMAT}; use the one that wrote it"
        )
    try:
        found = _Raw.model_validate(raw)
        sections: dict[str, Any] = {key: read_section(kind, key, raw[key]) for key, kind in _SECTIONS.items()}
        tokenize = read_section(TokenizeSettings, "tokenize", raw["tokenize"])
    except OtherVersion as error:
        raise OtherVersion(f"{path}: {error}") from None
    except (KeyError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise CheckpointError(f"{path}: damaged ({problem})") from None
    return Manifest(
        path=folder,
        progress=Progress(found.iteration, found.consumed_samples, found.guard, found.journal),
        experiment=Experiment.model_construct(**sections),
        tokenize=_kept_vocabulary(folder.parent, tokenize),
        data=found.data,
        content=found.content,
        end_of_text=found.end_of_text,
        files={name: entry.model_dump(exclude_none=True) for name, entry in found.files.items()},
    )


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
