"""The names of checkpoints and marks in a model folder. Imports no torch, so that a plan need not wait for it."""

import re
from pathlib import Path

_NAME = re.compile(r"iter_(\d{7,})")


def checkpoint_folder(model_folder: Path, iteration: int) -> Path:
    """The folder of one checkpoint: MODEL_FOLDER/iter_0000100."""
    return model_folder / f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int:
    """100 for MODEL_FOLDER/iter_0000100."""
    return int(folder.name.removeprefix("iter_"))


def stop_file(model_folder: Path) -> Path:
    """The file by which a person asks a training to save and stop."""
    return model_folder / "stop"


def stopped_mark(model_folder: Path) -> Path:
    """The file that says that a person stopped the last run; the next start removes it."""
    return model_folder / "stopped"


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint, finished or not (iter_0000100.….tmp)."""
    stem, _, rest = name.partition(".")
    return _NAME.fullmatch(stem) is not None and (not rest or rest.endswith("tmp"))


def checkpoint_folders(model_folder: Path) -> list[Path]:
    """The checkpoints in a model folder, newest first, usable or not. Empty folders are ignored.

    A save renames its folder once everything is on disk, so a killed save leaves no folder of such a name.
    """
    found = [path for path in model_folder.glob("iter_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted((path for path in found if any(path.iterdir())), key=iteration_of, reverse=True)


def newest_iteration(model_folder: Path) -> int:
    """Iteration of the newest checkpoint, usable or not; 0 if there is none."""
    return next(map(iteration_of, checkpoint_folders(model_folder)), 0)
