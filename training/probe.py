"""Run a few steps of a layout, and print predicted and measured memory and speed.

    python -m training.probe --config config.yaml --model tiny parallel.tensor=1
    torchrun --nproc-per-node 2 -m training.probe --config config.yaml --model tiny --output probe.json

Every process of a job runs it, alone or under torchrun, srun or submitit. The tokens are random, so no corpus is
needed. The first steps compile and warm up; then `--steps` are timed. Memory is that of the fullest process: on a GPU
the peak of all tensors, and other memory in use by the driver's count; on a CPU the resident set. FILE gets the figures
as JSON, or {"failed": reason} if a process runs out of memory or fails otherwise.
"""

import platform
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import psutil

from common import cli
from common.console import readable_bytes, say, text_table
from common.errors import RESUME_ME, InputError, ToolkitError
from common.files import write_json
from common.settings import Experiment, Settings
from training.launch.process_group import World, describe, joined
from training.launch.rank import check_layout, read_launch
from training.launch.signals import leave_at_once
from training.planning.fit import predict
from training.planning.layout import by_part
from training.planning.run import resolve_on_rank0
from training.planning.search import Prediction

if TYPE_CHECKING:
    from training.session import Session

WARM_UP = 2  # steps: the first compiles, in the second caches and the allocator settle


class Figures(NamedTuple):
    """Bytes of the fullest process at its peak; seconds of a step, and speeds of all processes together."""

    parameters: float
    optimizer: float
    """The optimiser's state."""
    transient: float
    """Everything else that tensors take at the peak: gradients, activations, logits and loss, communication."""
    context: float
    """Memory of the process that is not in tensors: the context, libraries, and what the allocator holds."""
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
        """The planner's figures."""
        parts = by_part(prediction.memory)
        parameters, optimizer, context = (parts.pop(part, 0.0) for part in ("parameters", "optimizer", "context"))
        speed = (prediction.step_seconds, prediction.tokens_per_second, prediction.mfu)
        if prediction.machine.device == "cpu":
            speed = (nan, nan, nan)  # not predicted
        return cls(parameters, optimizer, sum(parts.values()), context, *speed)

    @classmethod
    def measured(cls, memory: tuple[float, float, float, float], seconds: float, prediction: Prediction) -> Self:
        """From the first four figures and the seconds of a step; `prediction` is for the same layout."""
        speed_up = prediction.step_seconds / seconds
        return cls(*memory, seconds, prediction.tokens_per_second * speed_up, prediction.mfu * speed_up)

    def plain(self) -> dict[str, float]:
        """The figures for JSON."""
        return {**self._asdict(), "memory": self.memory}


@dataclass(frozen=True)
class RandomTokens:
    """Samples of random tokens, without end."""

    seq_len: int
    vocab_size: int

    @property
    def end_of_text(self) -> int:
        """The last token."""
        return self.vocab_size - 1

    def sample(self, number: int) -> npt.NDArray[np.int64]:
        """Tokens of one sample, shape (seq_len + 1,)."""
        return np.random.default_rng(number).integers(self.vocab_size, size=self.seq_len + 1)


def probe(settings: Settings, name: str, steps: int, output: Path | None = None) -> int:
    """Measure the layout of the model `name`; every process of the job calls this. Returns the exit code.

    Raises ToolkitError for what a person has to cure; `output` then says why.
    """
    launch, folder = read_launch(), settings.model_folder(name) / "probe"
    try:
        check = partial(check_layout, launch, settings.experiment(name).parallel, name)
        with joined(launch, folder, settings.cluster, check) as (world, _):
            from training.operations import choose_operations

            settings, machine = resolve_on_rank0(settings, name, world, check=False)
            experiment = settings.models[name]
            choose_operations(experiment, world, folder)
            memory, seconds = measure(experiment, world, steps)
            if world.rank == 0:
                prediction = predict(experiment, machine)
                _report(name, prediction, Figures.measured(memory, seconds, prediction), steps, output)
    except Exception as error:
        lost = isinstance(error, ToolkitError) and error.exit_code == RESUME_ME  # not the layout's fault
        if output is not None and not lost:
            with suppress(OSError, InputError):  # several processes may write the same reason
                write_json(output, {"failed": describe(error)})
        raise
    return 0


# ---------------------------------------------------------------------------------------------------------- measuring


def measure(experiment: Experiment, world: World, steps: int) -> tuple[tuple[int, int, int, int], float]:
    """Build the model, and run `steps` after the first ones (a collective call).

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
    """Bytes of this process: parameters, the optimiser's state, the other tensors at the peak, everything else.

    `before`: its resident bytes before the model was built, for CPUs.
    """
    import torch

    from training.metrics.device import memory
    from training.parallel.dtensor import local_shard

    device = session.world.device

    def here(values: list[Any]) -> int:
        shards = [local_shard(value) for value in values if isinstance(value, torch.Tensor)]
        return sum(shard.nbytes for shard in shards if shard.device.type == device.type)

    parameters = here([*session.parameters.values()])
    optimizer = here([value for state in session.optimizer.state.values() for value in state.values()])
    if device.type == "cuda":
        tensors = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        taken = total - free - torch.cuda.memory_reserved(device) + reserved
    else:
        taken = int(memory(device)["max resident"] * 2**20)
        tensors = max(taken - before, parameters + optimizer)
    return parameters, optimizer, tensors - parameters - optimizer, max(0, taken - tensors)


# ------------------------------------------------------------------------------------------------------------ results


def _report(name: str, prediction: Prediction, measured: Figures, steps: int, output: Path | None) -> None:
    """Print the table, and write the JSON file."""
    import torch

    layout, machine, predicted = prediction.layout, prediction.machine, Figures.predicted(prediction)
    say(f"probe: {name} in {steps} steps on {layout.world_size} x {machine.name}: {layout}")
    say(_table(predicted, measured))
    if output is not None:
        result = {
            "model": name,
            "layout": layout._asdict(),
            "steps": steps,
            "device": machine.name,
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()},
            "measured": measured.plain(),
            "predicted": predicted.plain(),
        }
        write_json(output, result)


def _table(predicted: Figures, measured: Figures) -> str:
    """One row per figure."""
    size = readable_bytes
    rows = {
        "parameters": (predicted.parameters, measured.parameters, size),
        "optimizer": (predicted.optimizer, measured.optimizer, size),
        "gradients, activations, loss, communication": (predicted.transient, measured.transient, size),
        "allocator and context": (predicted.context, measured.context, size),
        "memory of the fullest process": (predicted.memory, measured.memory, size),
        "step": (1000 * predicted.step_seconds, 1000 * measured.step_seconds, "{:,.1f} ms".format),
        "tokens/s": (predicted.tokens_per_second, measured.tokens_per_second, "{:,.0f}".format),
        "MFU": (predicted.mfu, measured.mfu, "{:.1%}".format),
    }
    lines = [("", "predicted", "measured", "error")]
    for name, (expected, actual, form) in rows.items():
        error = 100 * (expected - actual) / actual if actual else nan
        shown = "not predicted" if isnan(expected) else form(expected)
        lines.append((name, shown, form(actual), "-" if isnan(error) else f"{error:+.1f} %"))

    return text_table(lines, "lrrr")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("training.probe", __doc__)
    cli.add_model_settings(parser)
    parser.add_argument("--steps", type=cli.positive_int, default=5, metavar="N", help="steps to time (default 5)")
    parser.add_argument("--output", type=cli.output_file, metavar="FILE", help="the figures as JSON, or why it failed")
    arguments = parser.parse_args(argv)
    return probe(cli.read_settings(arguments), arguments.model, arguments.steps, arguments.output)


if __name__ == "__main__":
    leave_at_once()
    sys.exit(cli.run(main))
