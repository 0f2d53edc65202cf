"""Run a few steps of a layout, and print what the planner predicts beside what was measured.

    python -m training.probe --config config.yaml --model tiny
    torchrun --nproc-per-node 2 -m training.probe --config config.yaml --model tiny parallel.data=2 --output probe.json

Every process of a job runs it, as many as the layout asks for, alone or under torchrun, srun or submitit. The tokens
are random, so that no corpus is needed. The first steps compile and warm up; then `--steps` are timed. Memory is that
of the fullest process: on a GPU the peak of all tensors, and what the driver says is taken beside them; on a CPU the
resident set. FILE gets the figures as JSON, or {"failed": reason} if a process runs out of memory or fails otherwise.
The goals, memory within 10 % and time within 15 %, are judged on GPUs only.
"""

import platform
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from common import cli
from common.console import say
from common.errors import ConfigError, InputError, LostRankError
from common.files import write_json
from common.settings import Experiment, GpuSettings, Settings
from training.leaving import leave_at_once
from training.parallel.device import check_offload
from training.parallel.launch import Launch, check_world_size, read_launch
from training.parallel.network import check_interface
from training.parallel.process_group import QuietExit, World, before_start, describe, exit_code, started
from training.planning.comparison import Figures, goals, layout_text, table
from training.planning.cpu import cpu_machine
from training.planning.flops import flops_per_token
from training.planning.layout import Layout
from training.planning.machines import GIB, Machine, gpu_of_device
from training.planning.search import Prediction
from training.planning.workload import Workload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from training.step import Session

WARM_UP = 2  # steps: the first compiles, in the second caches and the allocator settle


@dataclass(frozen=True)
class RandomTokens:
    """Samples of random tokens, without end."""

    seq_len: int
    vocab_size: int

    @property
    def end_of_text(self) -> int:
        """The last token."""
        return self.vocab_size - 1

    def sample(self, number: int) -> "npt.NDArray[np.int64]":
        """Tokens of one sample, shape (seq_len + 1,)."""
        import numpy as np

        return np.random.default_rng(number).integers(self.vocab_size, size=self.seq_len + 1)


def probe(settings: Settings, name: str, steps: int, output: Path | None = None) -> int:
    """Measure the layout of the model `name`; every process of the job calls this. Returns the exit code.

    Raises ToolkitError for what a person has to cure; `output` then says why.
    """
    launch, folder = read_launch(), settings.model_folder(name) / "probe"
    try:
        with before_start(launch, folder):
            try:
                experiment = settings.experiment(name)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            check_world_size(launch, experiment.parallel, name)
            check_offload(experiment.parallel, name)
            check_interface(settings.cluster.interface)
            folder.mkdir(parents=True, exist_ok=True)
        with started(launch, folder, settings.cluster) as world:
            from training.operations import choose_operations

            choose_operations(experiment, world, folder)
            machine = machine_of(world.device, launch, settings)
            measured = measure(experiment, world, machine, steps)
            if world.rank == 0:
                _report(experiment, name, machine, measured, steps, output)
    except LostRankError as error:  # it says nothing about the layout
        return exit_code(error)
    except (Exception, QuietExit) as error:
        if output is not None:
            _record_failure(output, error.message if isinstance(error, QuietExit) else describe(error))
        raise
    return 0


def _record_failure(output: Path, reason: str) -> None:
    """Write why the layout failed; of several processes that fail alike, one does."""
    with suppress(OSError, InputError):
        write_json(output, {"failed": reason})


# ---------------------------------------------------------------------------------------------------------- measuring


def measure(experiment: Experiment, world: World, machine: Machine, steps: int) -> Figures:
    """Build the model, and run `steps` after the first ones (a collective call). `machine` gives the peak for MFU."""
    from training.parallel.collectives import all_gather
    from training.step import step_batches, train_step
    from training.trainer import open_session

    model, device = experiment.model, world.device
    before = _forget_peak(device)
    session = open_session(experiment, world)
    tokens = RandomTokens(model.seq_len, model.vocab_size)
    with closing(step_batches(session, tokens, 0)) as batches:
        for iteration in range(1, WARM_UP + steps + 1):
            if iteration == WARM_UP + 1:
                _synchronize(device)
                all_gather(None)  # all begin together
                begun = time.perf_counter()
            train_step(session, iteration, next(batches), experiment.train.lr)
            session.timers.collect()
        _synchronize(device)
        seconds = max(all_gather(time.perf_counter() - begun)) / steps
    speed = experiment.train.global_batch_size * model.seq_len / seconds
    precision = Workload.of(experiment, machine).precision
    mfu = speed * flops_per_token(model) / (world.size * machine.peak_flops(precision))
    parameters, optimizer, others, context = max(all_gather(_memory(session, before)), key=sum)
    return Figures(parameters, optimizer, others, context, seconds, speed, mfu)


def _synchronize(device: "torch.device") -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _forget_peak(device: "torch.device") -> int:
    """Count the peak from now on; returns the bytes that the process has taken so far, on a CPU."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    return int(psutil.Process().memory_info().rss)


def _memory(session: "Session", before: int) -> tuple[int, int, int, int]:
    """Bytes of this process: parameters, the optimiser's state, the other tensors at the peak, everything else."""
    import torch

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
        unit = 1 if sys.platform == "darwin" else 1024
        taken = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, psutil.Process().memory_info().rss)
        tensors = max(taken - before, parameters + optimizer)
    return parameters, optimizer, tensors - parameters - optimizer, max(0, taken - tensors)


# ------------------------------------------------------------------------------------------------------- the machine


def machine_of(device: "torch.device", launch: Launch, settings: Settings) -> Machine:
    """The machine that this process runs on: its kind of GPU with its real memory, or what is measured here."""
    import torch

    if device.type == "cpu":
        speed = launch.local_world_size * _product_flops(device, torch.float32)
        return cpu_machine(launch.local_world_size, psutil.virtual_memory().total, speed)
    name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    kind, gpu = gpu_of_device(name, settings.cluster.gpus) or (name, _unknown_gpu(device, memory))
    return Machine(kind, memory, gpu, launch.local_world_size)


def _unknown_gpu(device: "torch.device", memory: int) -> GpuSettings:
    """A kind of GPU that nobody has described: measured products and copies, and the links of an ordinary server."""
    import torch

    half = torch.cuda.is_bf16_supported(including_emulation=False)
    source = torch.empty(memory // 16, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    return GpuSettings(
        memory_gib=memory / GIB,
        bfloat16_tflops=_product_flops(device, torch.bfloat16) / 1e12 if half else 0,
        float16_tflops=_product_flops(device, torch.float16) / 1e12,
        float32_tflops=_product_flops(device, torch.float32) / 1e12,
        memory_gb_per_s=copied / 1e9,
        node_gb_per_s=25,  # PCIe 4.0 x16
        network_gb_per_s=12.5,  # 100 Gbit/s
    )


def _product_flops(device: "torch.device", dtype: "torch.dtype") -> float:
    """FLOP/s of a large product of matrices."""
    import torch

    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: left @ right, device)


def _seconds(run: Any, device: "torch.device") -> float:
    """The fastest of three, after one to warm up."""
    times = []
    for _ in range(4):
        _synchronize(device)
        begun = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - begun)
    return min(times[1:])


# ------------------------------------------------------------------------------------------------------------ results


def _report(
    experiment: Experiment, name: str, machine: Machine, measured: Figures, steps: int, output: Path | None
) -> None:
    """Print the table, and write the JSON file."""
    import torch

    layout = Layout.of(experiment)
    predicted = Figures.predicted(Prediction(Workload.of(experiment, machine), layout, machine))
    say(f"probe: {name} in {steps} steps on {layout.world_size} x {machine.name}: {layout_text(layout)}")
    say(table(predicted, measured))
    for line in goals(predicted, measured, machine.device):
        say(line)
    if output is not None:
        found = {
            "model": name,
            "layout": layout._asdict(),
            "steps": steps,
            "device": machine.name,
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()},
            "measured": measured.plain(),
            "predicted": predicted.plain(),
        }
        write_json(output, found)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("training.probe", __doc__)
    cli.add_model_settings(parser)
    parser.add_argument("--steps", type=cli.positive_int, default=5, metavar="N", help="steps to time (default 5)")
    parser.add_argument("--output", type=cli.output_file, metavar="FILE", help="the figures as JSON, or why it failed")
    arguments = parser.parse_args(argv)
    with before_start(read_launch()):
        settings = cli.read_settings(arguments)
    return probe(settings, arguments.model, arguments.steps, arguments.output)


if __name__ == "__main__":
    leave_at_once()
    sys.exit(cli.run(main))
