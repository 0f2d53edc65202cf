"""training.json in a Hugging Face folder that we wrote: what the model was trained on, and which files are ours.

    {"format": 1, "iteration": 320000, "consumed_samples": 163840000, "split": "949,50,1", "data": "…",
     "files": {"model.safetensors": {"size": 497774208, "xxh3": "…"}, …}}

`transformers` ignores the file. No torch in here.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from common.errors import InputError
from common.files import read_json, write_json
from common.folders import first_stranger

NAME = "training.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
FILES = ("config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES, NAME)
"""Every name that `training.huggingface.folder.write_folder` may give to a file."""
_FORMAT = 1


@dataclass(frozen=True)
class Origin:
    """Where the weights of a folder come from."""

    iteration: int
    """Optimiser steps of the run."""
    consumed_samples: int
    """Samples that it had used up."""
    split: str
    """Its train.split: which documents are for training, validation and test."""
    data: str
    """Identity of what it was trained on, as in the checkpoint's manifest."""


def write_origin(folder: Path, origin: Origin | None) -> None:
    """Describe a folder that is otherwise complete, from its files; without an origin, its files alone."""
    files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    write_json(folder / NAME, {"format": _FORMAT, **(asdict(origin) if origin else {}), "files": files})


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "xxh3": hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}


def _read(folder: Path) -> dict[str, Any]:
    """training.json of ours, or nothing."""
    try:
        raw = read_json(folder / NAME)
    except (InputError, OSError):
        return {}
    return raw if isinstance(raw, dict) and raw.get("format") == _FORMAT and isinstance(raw.get("files"), dict) else {}


def split_of(folder: Path) -> str | None:
    """The train.split of the run that a folder was merged from; None where nothing says so."""
    split = _read(folder).get("split")
    return split if isinstance(split, str) else None


def stranger(folder: Path, successor: Path | None = None) -> Path | None:
    """The first entry of a model folder that is not as we wrote it; None where replacing the folder loses nothing.

    A file is ours when training.json has its size and checksum, or when `successor`, the folder that is to take this
    one's place, holds the same bytes. Without a successor tokenizer files that no training.json vouches for are not yet
    judged.
    """
    if unknown := first_stranger(folder, FILES.__contains__):
        return unknown
    raw = _read(folder)
    for path in sorted(folder.iterdir()):
        if path.name == NAME and raw:
            continue
        known = [raw["files"].get(path.name)] if raw else []
        if successor is not None and (successor / path.name).is_file():
            known.append(_digest(successor / path.name))
        undecided = not raw and successor is None and path.name in TOKENIZER_FILES
        if not undecided and _digest(path) not in known:
            return path
    return None
