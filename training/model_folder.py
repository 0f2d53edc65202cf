"""The names of checkpoints and marks in a model folder, and whether its training is finished.

Imports no torch, so that a plan need not wait for it.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config import load_settings
from common.errors import ConfigError
from common.files import read_json
from common.settings import Settings, TrainSettings, changes
from common.settings.experiment import LENGTH

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


def is_finished(settings: Settings, name: str) -> bool:
    """Whether a model has been trained to its last iteration, or until it improved no more.

    Raises ConfigError if it is finished, but by settings that train another model: those of its last start.
    """
    folder, last = settings.model_folder(name), settings.model_folder(name) / "settings.yaml"
    end = read_json(folder / "done.json") if (folder / "done.json").exists() else {}
    if not _ends(end, settings.models[name].train):
        return False
    earlier = load_settings(last) if last.exists() else settings
    if name in earlier.models:  # the folder may have been renamed
        then, now = (_recipe(one, name) for one in (earlier, settings))
        check_same_training(folder, then, now, ended=_ends(end, earlier.models[name].train))
    return True


def _ends(end: Mapping[str, Any], train: TrainSettings) -> bool:
    """Whether a training ends where a done.json says."""
    without = end.get("validations_without_improvement", 0)
    return int(end.get("iteration", 0)) >= train.iterations or 0 < train.stop_after_no_improvement <= without


def _recipe(settings: Settings, name: str) -> dict[str, Any]:
    """What the weights depend on; paths below the run are relative, so that a run may be renamed."""
    return dict(json.loads(json.dumps(settings.models[name].recipe).replace(f'"{settings.run}/', '"RUN/')))


def check_same_training(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any], *, ended: bool) -> None:
    """Raise ConfigError if a model that needs no more iterations was trained by another recipe than that of now.

    `ended`: whether it had also ended by the earlier settings; if not, `LENGTH` may be lowered to what is done.
    """
    length = tuple(f"models.{folder.name}.{key} " for key in LENGTH)
    changed = [line for line in changes(then, now, f"models.{folder.name}.") if ended or not line.startswith(length)]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)}, but the model in {folder} is finished, and other values need a new training; set "
            "them back, choose another model name (training.train --name), or move the folder away"
        )
