"""The names in a run's folder. Needs no torch: a plan is checked before anything is imported that takes seconds."""

import re
from pathlib import Path

_NAME = re.compile(r"iter_(\d{7,})")


def iteration_folder(model_folder: Path, iteration: int) -> Path:
    """RUN/iter_0000100."""
    return model_folder / f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int:
    """100 of RUN/iter_0000100."""
    return int(folder.name.removeprefix("iter_"))


def is_iteration(folder: Path) -> bool:
    """Whether a folder has the name of a checkpoint, or of one that was never finished (iter_0000100.….tmp)."""
    name, _, rest = folder.name.partition(".")
    return _NAME.fullmatch(name) is not None and (not rest or rest.endswith("tmp"))


def iterations(model_folder: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first, usable or not.

    A folder gets such a name when all of it is on the disk, so that a killed save leaves none. An empty one is none.
    """
    found = [path for path in model_folder.glob("iter_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted((path for path in found if any(path.iterdir())), key=iteration_of, reverse=True)
