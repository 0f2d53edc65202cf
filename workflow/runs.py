"""The folder of a run: the settings that made it, and the paths that it has had."""

from functools import cache
from pathlib import Path
from typing import Any

from common import run_card
from common.config import load_settings
from common.console import note
from common.errors import ConfigError, InputError
from common.files import read_json
from common.settings import Settings

note_once = cache(note)
"""Print a note unless it was printed before."""


def load_run(run: Path) -> Settings:
    """The settings of a run's last start, with its own paths below `run`: it may have been moved.

    Raises InputError if the folder is not a run's.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise InputError(f"{path}: no such file; name the folder of a run that snakemake made")
    try:
        return moved(load_settings(path), run)
    except ConfigError as error:
        raise ConfigError(f'{error}; if it is damaged: cp "$(ls -t {run}/settings/*.yaml | head -1)" {path}') from None


def moved(settings: Settings, run: Path) -> Settings:
    """Settings with the run's own paths below `run`, where it is now."""
    own = {"encoder_json": run / "tokenizer/encoder.json", "vocab_bpe": run / "tokenizer/vocab.bpe"}
    tokenize = settings.tokenize.model_copy(update=own if settings.train_tokenizer.vocab_size else {})
    return settings.model_copy(update={"run": run, "tokenize": tokenize})


def read_takedown(record: Path) -> Any:
    """A record of `workflow.provenance.remove`. Raises InputError if it is damaged."""
    command = f"python -m workflow.provenance.remove --run {record.parents[1]}"
    return read_json(record, f"delete it and run `{command}` with the same --urls again")


def is_copy(run: Path) -> bool:
    """Whether a run was started last in another folder than this one."""
    inode = read_card(run).get("inode")
    return inode is not None and inode != run.stat().st_ino


def place(run: Path) -> dict[str, Any]:
    """What run.json says of a run's folder: every path that it has had, and its inode."""
    return {"names": sorted({*read_card(run).get("names", []), str(run)}), "inode": run.stat().st_ino}


def read_card(run: Path) -> dict[str, Any]:
    """The content of run.json; empty if it is missing, or damaged, which prints a note."""
    path = run / run_card.NAME
    try:
        return dict(read_json(path, "the next start writes it again")) if path.is_file() else {}
    except InputError as error:
        note_once(str(error))
        return {}
