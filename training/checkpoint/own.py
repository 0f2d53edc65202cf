"""Which files of a checkpoint folder are ours: a folder with anything else in it is never removed."""

import re
from pathlib import Path

from common.console import warn
from common.errors import InputError
from common.folders import first_stranger, remove_own

_OWN = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|manifest\.json(\.tmp)?")


def stranger_in(folder: Path) -> Path | None:
    """The first entry of a checkpoint folder that no save wrote."""
    return first_stranger(folder, _OWN.fullmatch)


def discard(folder: Path) -> None:
    """Remove what a save or a removal left behind, if it exists; with somebody else's files in it, it stays."""
    try:
        remove_own(folder, _OWN.fullmatch)
    except (InputError, OSError) as error:
        warn(f"not removed: {error}")
