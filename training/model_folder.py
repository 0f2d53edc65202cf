"""The checkpoints and marks in a model folder. Imports no torch: a plan does not wait for it."""

import json
import re
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
    """The file that marks a run that a person stopped; the next start removes it."""
    return model_folder / "stopped"


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint, finished or not (iter_0000100.….tmp)."""
    stem, _, rest = name.partition(".")
    return _NAME.fullmatch(stem) is not None and (not rest or rest.endswith("tmp"))


def checkpoint_folders(model_folder: Path) -> list[Path]:
    """The checkpoints in a model folder, newest first, usable or not; without empty folders.

    A killed save leaves no such folder: a save renames its folder when everything is on disk.
    """
    folders = [path for path in model_folder.glob("iter_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted((path for path in folders if any(path.iterdir())), key=iteration_of, reverse=True)


def newest_iteration(model_folder: Path) -> int:
    """Iteration of the newest checkpoint, usable or not; 0 if there is none."""
    return next(map(iteration_of, checkpoint_folders(model_folder)), 0)


def is_finished(settings: Settings, name: str) -> bool:
    """Whether a model has been trained to its last iteration, or until it stopped improving.

    Raises ConfigError if it has, but by another recipe (`Experiment.recipe`) than in `settings`.
    """
    folder, now = settings.model_folder(name), settings.models[name]
    done = folder / "done.json"
    cure = "delete it: the training, which starts again, finds its last checkpoint and writes it"
    end = read_json(done, cure) if done.exists() else {"iteration": newest_iteration(folder)}
    at = (int(end.get("iteration", 0)), int(end.get("validations_without_improvement", 0)))
    if not is_end(now.train, *at):
        return False
    earlier = last_settings(settings, name)
    then = earlier.models.get(name, now)  # the model's folder may have been renamed
    changed = changes(then.recipe, as_in(earlier.run, now.recipe, settings.run))
    if not is_end(then.train, *at):  # a training that was stopped may end there
        changed = [line for line in changed if not line.startswith(LENGTH)]
    if changed:
        raise ConfigError(
            f"models.{name}: {', '.join(changed)}, but {folder} is finished, and other values need a new training; set "
            "them back, choose another model name (training.train --name), or move the folder away"
        )
    return done.exists()


def last_settings(settings: Settings, name: str) -> Settings:
    """The settings that a model was trained with last; `settings` if its folder has none."""
    path = settings.model_folder(name) / "settings.yaml"
    return load_settings(path) if path.exists() else settings


def as_in(run: Path, values: Any, now: Path) -> Any:
    """Plain settings of a run in `now`, with its own paths below `run`, where it was once."""
    return json.loads(json.dumps(values).replace(f'"{now}/', f'"{run}/'))


def is_end(train: TrainSettings, iteration: int, without_improvement: int) -> bool:
    """Whether a training ends; `without_improvement`: validation runs since the lowest loss."""
    return iteration >= train.iterations or 0 < train.stop_after_no_improvement <= without_improvement
