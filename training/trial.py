"""A few steps of one layout on random tokens: their memory and speed, as predicted and as measured.

    run_trial(settings, "tiny", steps=5, output=Path("trial.json"))      # every process of the job

`python -m cluster.autotune` starts it as a job (`cluster.TrialJob`). The first steps compile and
warm up; then `steps` are timed. Memory is that of the fullest process: on a GPU the peak of all
tensors, and other memory in use by the driver's count; on a CPU the resident set.
"""

import platform
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import psutil

from common.errors import RESUME_ME, InputError, ToolkitError
from common.files import write_json
from common.settings import Experiment, Settings
from training.launch.process_group import World, describe, joined
from training.launch.rank import check_layout, read_launch
from training.planning.layout import by_part
from training.planning.run import machine_of
from training.planning.search import Prediction, predict

if TYPE_CHECKING:
    from training.session import Session

WARM_UP = 2  # steps: the first compiles, in the second caches and the allocator settle


class Figures(NamedTuple):
    """Bytes of the fullest process at its peak, seconds of a step, and speeds of all processes."""

    parameters: float
    optimizer: float
    """The optimiser's state."""
    transient: float
    """All other tensors: gradients, activations, logits and loss, communication."""
    context: float
    """Memory outside tensors: the context, libraries, and what the allocator holds."""
    step_seconds: float
    tokens_per_second: float
    mfu: float
    """The share of the peak that the model's work takes."""

    @property
    def memory(self) -> float:
        """All memory of the process on its device."""
        return self.parameters + self.optimizer + self.transient + self.context

    @classmethod
    def predicted(cls, prediction: Prediction) -> Self:
        """The planner's figures; speeds are NaN on CPUs, where they are not predicted."""
        parts = by_part(prediction.memory)
        parameters, optimizer, context = (parts.pop(part, 0.0) for part in ("parameters", "optimizer", "context"))
        speed = (prediction.step_seconds, prediction.tokens_per_second, prediction.mfu)
        if prediction.machine.device == "cpu":
            speed = (nan, nan, nan)
        return cls(parameters, optimizer, sum(parts.values()), context, *speed)

    @classmethod
    def measured(cls, memory: tuple[float, float, float, float], seconds: float, prediction: Prediction) -> Self:
        """From the first four figures and the seconds of a step, for the layout of `prediction`."""
        speed_up = prediction.step_seconds / seconds
        return cls(*memory, seconds, prediction.tokens_per_second * speed_up, prediction.mfu * speed_up)


@dataclass(frozen=True)
class RandomTokens:
    """Endless samples of random tokens."""

    seq_len: int
    vocab_size: int

    @property
    def end_of_text(self) -> int:
        """The last token."""
        return self.vocab_size - 1

    def sample(self, number: int) -> npt.NDArray[np.int64]:
        """Tokens of one sample, shape (seq_len + 1,)."""
        return np.random.default_rng(number).integers(self.vocab_size, size=self.seq_len + 1)


def run_trial(settings: Settings, name: str, steps: int, output: Path) -> None:
    """Measure the model `name` in its layout; every process of the job calls this.

    `output` gets the figures as JSON, or {"failed": reason} for an error of the layout. Raises that
    error, too.
    """
    launch, folder, experiment = read_launch(), settings.model_folder(name), settings.experiment(name)
    try:
        check = partial(check_layout, launch, experiment.parallel, name)
        with joined(launch, folder, settings.cluster, check) as (world, _):
            from training.operations import choose_operations

            choose_operations(experiment, world, folder)
            memory, seconds = measure(experiment, world, steps)
            if world.rank == 0:
                prediction = predict(experiment, machine_of(world, settings.cluster))
                figures = Figures.predicted(prediction), Figures.measured(memory, seconds, prediction)
                write_json(output, _result(name, prediction, steps, *figures))
    except Exception as error:
        lost = isinstance(error, ToolkitError) and error.exit_code == RESUME_ME  # not the layout's fault
        if not lost:
            with suppress(OSError, InputError):  # several processes may write the same reason
                write_json(output, {"failed": describe(error)})
        raise


def _result(name: str, prediction: Prediction, steps: int, predicted: Figures, measured: Figures) -> dict[str, object]:
    """The content of `output`."""
    import torch

    return {
        "model": name,
        "layout": prediction.layout._asdict(),
        "steps": steps,
        "device": prediction.machine.name,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()},
        "measured": {**measured._asdict(), "memory": measured.memory},
        "predicted": {**predicted._asdict(), "memory": predicted.memory},
    }


def measure(experiment: Experiment, world: World, steps: int) -> tuple[tuple[int, int, int, int], float]:
    """Build the model, warm up, and time `steps` together (a collective call).

    Returns the memory of the fullest process, see `_memory`, and the seconds of a step.
    """
    import torch

    from training.parallel.collectives import all_gather
    from training.session import open_session
    from training.step import step_batches, train_step

    model, device = experiment.model, world.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before: int = psutil.Process().memory_info().rss
    synchronize = torch.get_device_module(device).synchronize
    session = open_session(experiment, world)
    tokens = RandomTokens(model.seq_len, model.vocab_size)
    with closing(step_batches(session, tokens, 0)) as batches:
        for iteration in range(1, WARM_UP + steps + 1):
            if iteration == WARM_UP + 1:
                synchronize()
                all_gather(None)  # all begin together
                begun = time.perf_counter()
            train_step(session, iteration, next(batches), experiment.train.lr)
            session.timers.collect()
        synchronize()
        seconds = max(all_gather(time.perf_counter() - begun)) / steps
    memory: tuple[int, int, int, int] = max(all_gather(_memory(session, before)), key=sum)
    return memory, seconds


def _memory(session: "Session", before: int) -> tuple[int, int, int, int]:
    """The first four `Figures` of this process; `before`: its resident bytes without the model."""
    import torch

    from training.metrics.device import memory
    from training.parallel.dtensor import local_shard

    device = session.world.device

    def on_device(values: Iterable[object]) -> int:
        shards = [local_shard(value) for value in values if isinstance(value, torch.Tensor)]
        return sum(shard.nbytes for shard in shards if shard.device.type == device.type)

    parameters = on_device(session.parameters.values())
    optimizer = on_device(value for state in session.optimizer.state.values() for value in state.values())
    if device.type == "cuda":
        tensors = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        taken = total - free - torch.cuda.memory_reserved(device) + reserved
    else:
        taken = int(memory(device)["max resident"] * 2**20)
        tensors = max(taken - before, parameters + optimizer)
    return parameters, optimizer, tensors - parameters - optimizer, max(0, taken - tensors)
