"""training.json in a Hugging Face folder of ours: what the model was trained on, and a hash of each file we wrote.

    {"format": 1, "iteration": 320000, "consumed_samples": 163840000, "split": "949,50,1", "data": "…",
     "files": {"model.safetensors": {"size": 497774208, "xxh3": "…"}, …}}

`transformers` ignores the file. Imports no torch.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from common.errors import InputError
from common.files import read_json, write_json
from common.folders import first_foreign_file

NAME = "training.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
FILES = ("config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES, NAME)
"""Every file name that `save_pretrained` may write."""
_FORMAT = 1


@dataclass(frozen=True)
class Origin:
    """Where the weights of a folder come from."""

    iteration: int
    """Optimiser steps of the run."""
    consumed_samples: int
    """Samples consumed by then."""
    split: str
    """The run's train.split: the shares of training, validation and test documents."""
    data: str
    """Identity of the training data, as in the checkpoint's manifest."""


def write_origin(folder: Path, origin: Origin | None) -> None:
    """Write training.json for a folder that is otherwise complete; without an origin it lists the files only."""
    files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    write_json(folder / NAME, {"format": _FORMAT, **(asdict(origin) if origin else {}), "files": files})


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "xxh3": hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}


def _read(folder: Path) -> dict[str, Any]:
    """The content of training.json; empty if it is missing or not ours."""
    try:
        raw = read_json(folder / NAME)
    except (InputError, OSError):
        return {}
    return raw if isinstance(raw, dict) and raw.get("format") == _FORMAT and isinstance(raw.get("files"), dict) else {}


def trained_split(folder: Path) -> str | None:
    """The train.split of the run that a folder was merged from; None if it is not recorded."""
    split = _read(folder).get("split")
    return split if isinstance(split, str) else None


def first_changed_file(folder: Path, successor: Path | None = None) -> Path | None:
    """The first entry of a Hugging Face folder that is not as we wrote it; None if the folder can safely be replaced.

    A file is ours if training.json has its size and checksum, or if `successor`, the folder that replaces this one,
    holds the same bytes. Without a successor, tokenizer files are accepted if there is no training.json.
    """
    if unknown := first_foreign_file(folder, FILES.__contains__):
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
