"""Send a run's figures to TensorBoard and Weights & Biases.

Both are optional: the CSV files have everything that they show.
"""

import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.console import warn
from common.errors import ConfigError
from common.files import write_text
from common.settings import LogSettings
from training.launch.rank import starting


def check_boards(log: LogSettings, name: str) -> None:
    """Raise ConfigError if the model `name` needs a board that is not installed."""
    if log.wandb and find_spec("wandb") is None:
        raise ConfigError(f"models.{name}.log.wandb is {log.wandb!r}, but wandb is not installed: pip install wandb")


def open_boards(
    log: LogSettings, name: str, folder: Path, iteration: int, config: Mapping[str, Any], *, on_rank0: bool
) -> "list[Board]":
    """Open the boards of the model `name` on rank 0 (a collective call).

    `iteration` is the one that the run resumes from, `config` the settings that W&B shows. Raises
    ConfigError on all ranks if W&B refuses, without a login for example.
    """
    from training.parallel.collectives import run_on_all_ranks  # with torch, which check_boards does not need

    def opened() -> list[Board]:
        boards: list[Board] = []
        if on_rank0 and log.tensorboard:
            try:
                boards.append(TensorBoard(folder, iteration))
            except ImportError as error:
                warn(f"no TensorBoard files ({error}): pip install tensorboard, or log.tensorboard: false")
        if on_rank0 and log.wandb:
            starting(0, "connects to Weights & Biases")
            boards.append(WeightsAndBiases(folder, log.wandb, name, iteration, config))
        return boards

    return run_on_all_ranks(opened)


class TensorBoard:
    """Event files in MODEL_FOLDER/tensorboard, without earlier starts' points after `iteration`."""

    def __init__(self, folder: Path, iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # without the purge, the resumed curve would overlap the one of the killed run
        self._writer = SummaryWriter(folder / "tensorboard", purge_step=iteration + 1)

    def show(self, figures: Mapping[str, float], iteration: int) -> None:
        """Show one iteration's figures by name (`train/lm_loss`)."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def close(self, success: bool) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """One run of a W&B project per start; MODEL_FOLDER/wandb.id names the group of all starts.

    With one run for all starts, uploading the offline files of a start would replace those of the
    previous start, and iterations after an older checkpoint could not be shown again.
    """

    def __init__(self, folder: Path, project: str, name: str, iteration: int, config: Mapping[str, Any]) -> None:
        import wandb

        path = folder / "wandb.id"
        if not path.exists():
            write_text(path, secrets.token_hex(4) + "\n")
        try:
            self._run: Any = wandb.init(
                project=project,
                group=f"{name}-{path.read_text(encoding='utf-8').strip()}",
                name=f"{name} from {iteration}",
                dir=folder,
                config=dict(config),
            )
        except wandb.Error as error:
            problem = " ".join(str(error).split())
            raise ConfigError(
                f"models.{name}.log.wandb: {problem} (log in with `wandb login`, or set WANDB_MODE=offline)"
            ) from None

    def show(self, figures: Mapping[str, float], iteration: int) -> None:
        """Show one iteration's figures by name; W&B joins those of one iteration."""
        self._run.log(dict(figures), step=iteration)

    def close(self, success: bool) -> None:
        """Flush and close; `success` sets the run's status."""
        self._run.finish(exit_code=0 if success else 1)


Board = TensorBoard | WeightsAndBiases
