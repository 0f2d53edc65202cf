"""training.json in our Hugging Face folders: the training data, and a hash of each file.

    {"format": 1, "iteration": 320000, "consumed_samples": 163840000, "split": "949,50,1",
     "data": "…", "files": {"model.safetensors": {"size": 497774208, "xxh3": "…"}, …}}

`transformers` ignores the file. It does not list run.json, which has a date. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, get_args

from common import run_card
from common.errors import CheckpointError, InputError
from common.files import digest, read_json, write_json
from common.files.writing import first_foreign_file

NAME = "training.json"
CARD = run_card.NAME
REPORT = "merge_report.json"
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
"""The files that hold a tokenizer's vocabulary: GPT-2's, BERT's, SentencePiece's."""
TOKENIZER_FILES = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_FORMAT = 1


@dataclass(frozen=True)
class Origin:
    """Where the weights of a folder come from; None where unknown."""

    iteration: int | None = None
    """Optimiser steps of the run."""
    consumed_samples: int | None = None
    """Samples consumed by then."""
    split: str | None = None
    """The run's train.split: the shares of training, validation and test documents."""
    data: str | None = None
    """Identity of the training data, as in the checkpoint's manifest."""
    reset_position_ids: bool | None = None
    """The run's train.reset_position_ids."""
    reset_attention_mask: bool | None = None
    """The run's train.reset_attention_mask."""
    eod_mask_loss: bool | None = None
    """The run's train.eod_mask_loss."""

    @classmethod
    def of_facts(cls, iteration: int | None, samples: int | None, facts: Mapping[str, Any]) -> Self:
        """An origin that takes its other fields from `facts`."""
        return cls(iteration, samples, **{field.name: facts.get(field.name) for field in fields(cls)[2:]})

    @property
    def facts(self) -> dict[str, Any]:
        """The known fields without the position in the run."""
        return {field.name: value for field in fields(self)[2:] if (value := getattr(self, field.name)) is not None}


def shard_name(number: int, count: int) -> str:
    """The name of one of several weight files, counted from 1."""
    return f"model-{number:05}-of-{count:05}.safetensors"


def write_origin(folder: Path, origin: Origin | None, known: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Write training.json, the last file of a folder; without an origin it lists only the files.

    `known` has the entries of files that were hashed during the write.
    """
    known = known or {}
    files = {path.name: known.get(path.name) or digest(path) for path in sorted(folder.iterdir())}
    write_json(folder / NAME, {"format": _FORMAT, **(asdict(origin) if origin else {}), "files": files})


def check_hash(path: Path) -> None:
    """Raise CheckpointError if a file differs from its hash in the folder's training.json."""
    known = _read(path.parent).get("files", {}).get(path.name)
    if known and digest(path) != known:
        raise CheckpointError(
            f"{path}: damaged or changed (differs from its hash in {NAME}); copy it again, or remove {NAME} if you "
            "changed it"
        )


def check_files(folder: Path) -> list[Path]:
    """The files in the folder's training.json; none in a folder of another origin.

    Raises CheckpointError naming a file that is missing or differs from its hash.
    """
    files = [folder / name for name in _read(folder).get("files", {})]
    if not files and (folder / NAME).exists():
        raise CheckpointError(f"{folder / NAME}: damaged; copy it again, or remove it if it is not of this toolkit")
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"{path}: missing from its folder, {NAME} lists it; copy it again")
        check_hash(path)
    return files


def _read(folder: Path) -> dict[str, Any]:
    """The content of training.json; empty if it is missing or not ours."""
    try:
        raw = read_json(folder / NAME)
    except (InputError, OSError):
        return {}
    return raw if isinstance(raw, dict) and raw.get("format") == _FORMAT and isinstance(raw.get("files"), dict) else {}


def read_origin(folder: Path) -> Origin | None:
    """The recorded origin, without values of a wrong type; None if there is no training.json."""
    raw = _read(folder)
    known = {
        field.name: raw.get(field.name) for field in fields(Origin) if type(raw.get(field.name)) in get_args(field.type)
    }
    return Origin(**known) if raw else None


def first_changed_file(folder: Path) -> Path | None:
    """The first entry that differs from training.json; None if the folder may be replaced."""
    raw = _read(folder)
    files = raw.get("files", {})
    ours = {*files, NAME, CARD} if raw else set()
    if unknown := first_foreign_file(folder, ours.__contains__):
        return unknown
    kept = (path for path in sorted(folder.iterdir()) if path.name in files)
    return next((path for path in kept if digest(path) != files[path.name]), None)
