"""TensorBoard and Weights & Biases: the figures of a run where people already look at curves.

Both are optional. Each is a folder or a service beside the CSV files, which have everything that it shows.
"""

import importlib.util
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from common.console import warn
from common.errors import ConfigError
from common.files import write_text
from common.settings import Experiment, LogSettings
from training.parallel.collectives import all_gather


class Board(Protocol):
    """Something that draws curves."""

    def show(self, figures: Mapping[str, float], iteration: int) -> None:
        """Figures of one iteration by their names (`train/lm_loss`)."""

    def close(self, success: bool) -> None:
        """Bring everything home; `success` sets the run's status."""


def check_boards(log: LogSettings, name: str) -> None:
    """ConfigError when the model `name` asks for a board that is not installed."""
    if log.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"models.{name}.log.wandb is {log.wandb!r}, but wandb is not installed: pip install wandb")


def open_boards(experiment: Experiment, name: str, folder: Path, iteration: int, *, on_rank0: bool) -> list[Board]:
    """The boards of a run that goes on after `iteration`, on the rank that speaks (a collective call).

    Raises ConfigError on all ranks when Weights & Biases refuses, for want of a login, say.
    """
    boards: list[Board] = []
    problem = ""
    if on_rank0 and experiment.log.tensorboard:
        try:
            boards.append(TensorBoard(folder, iteration))
        except ImportError as error:
            warn(f"no TensorBoard files ({error}): pip install tensorboard, or log.tensorboard: false")
    if on_rank0 and experiment.log.wandb:
        try:
            boards.append(WeightsAndBiases(folder, experiment, name))
        except ConfigError as error:
            problem = str(error)
    if any(problems := all_gather(problem)):
        raise ConfigError(next(filter(None, problems)))
    return boards


class TensorBoard:
    """Event files in RUN/tensorboard; what an earlier start showed after `iteration` is taken back."""

    def __init__(self, folder: Path, iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # without the purge, the curve of a resumed run would fold back over what a killed one had shown
        self._writer = SummaryWriter(folder / "tensorboard", purge_step=iteration + 1)
        self._hook = threading.excepthook
        threading.excepthook = self._failed

    def _failed(self, failure: threading.ExceptHookArgs) -> None:
        """The writer's thread raises in `show` what went wrong in it: no need to print it here."""
        if getattr(failure.thread, "exception", None) is not failure.exc_value:
            self._hook(failure)

    def show(self, figures: Mapping[str, float], iteration: int) -> None:
        """See Board."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def close(self, success: bool) -> None:
        """See Board."""
        threading.excepthook = self._hook
        self._writer.close()


class WeightsAndBiases:
    """One run of a W&B project; its id is kept in RUN/wandb.id, so that a resumed run goes on in the same one."""

    def __init__(self, folder: Path, experiment: Experiment, name: str) -> None:
        import wandb

        path = folder / "wandb.id"
        if not path.exists():
            write_text(path, secrets.token_hex(4) + "\n")
        try:
            self._run: Any = wandb.init(
                project=experiment.log.wandb,
                name=name,
                id=path.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=folder,
                config=experiment.model_dump(mode="json"),
            )
        except wandb.Error as error:
            problem = " ".join(str(error).split())
            raise ConfigError(
                f"models.{name}.log.wandb: {problem} (log in with `wandb login`, or set WANDB_MODE=offline)"
            ) from None
        # W&B's own step may never go back, but a run that is resumed with other settings does
        self._run.define_metric("*", step_metric="iteration")

    def show(self, figures: Mapping[str, float], iteration: int) -> None:
        """See Board."""
        self._run.log({**figures, "iteration": iteration})

    def close(self, success: bool) -> None:
        """See Board."""
        self._run.finish(exit_code=0 if success else 1)
