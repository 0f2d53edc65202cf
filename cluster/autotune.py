"""Measure the layouts that the planner expects to be the fastest, and choose the one that is.

    python -m cluster.autotune --config config.yaml --model tiny --gpus 2
    python -m cluster.autotune --config run.yaml --model gpt2_345m --gpus 16 --top 8 --write best.yaml

Runs a few steps of each of the best `--top` predicted layouts with `training.probe`, one job after the other, submitted
like those of `cluster.submit`. A layout that fails is reported, and the others go on. RUN/autotune/NAME has a
result per layout, layout_HASH.json, named after everything that it depends on: the same command, started again,
measures only what is missing. Ctrl-C ends the job. `--write` gets the keys of the layout with the most tokens per
second. Exit code 2: no layout could be measured.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster import slurm
from cluster.jobs import Job, log_tail, poll
from cluster.submission import end, make_snapshot, nodes_and_tasks, start
from cluster.training_job import TrainingJob
from common import cli
from common.console import readable_bytes
from common.errors import ConfigError, JobError, ToolkitError
from common.files import read_json, short_hash, write_text
from common.settings import Experiment, Settings
from training.planning.fit import nothing_fits
from training.planning.layout import PlanRequest, Workload
from training.planning.machines import Machine, machine_of_job, processes_of
from training.planning.search import Prediction, search
from training.planning.table import config_text

_LAG = 20.0  # seconds for a job's last file to appear on a network file system


def best_layouts(experiment: Experiment, machine: Machine, request: PlanRequest) -> list[tuple[Prediction, Experiment]]:
    """The layouts that fit, the fastest first, each with the experiment in it."""
    found = []
    for prediction in search(Workload.of(experiment, machine), machine, request):
        try:
            found.append((prediction, prediction.layout.apply(experiment)))
        except ValueError:  # another key rules it out, such as train.compile
            continue
    return found


def trial_name(experiment: Experiment, machine: Machine, container: str, steps: int) -> str:
    """A hash of everything that a result depends on."""
    keys = experiment.model_dump_json(include={"model", "parallel", "train"})
    return f"layout_{short_hash(repr([keys, machine.name, machine.per_node, container, steps, version('torch')]))}"


def autotune(
    settings: Settings, name: str, request: PlanRequest, options: argparse.Namespace
) -> tuple[Prediction, dict[str, float]]:
    """Measure the best layouts, print them as they come; returns the fastest, and its figures.

    Raises ConfigError if no layout fits, and JobError if none could be measured.
    """
    cluster, experiment = settings.cluster, settings.models[name]
    machine = machine_of_job(experiment, cluster)
    if machine is None:
        raise ConfigError("cluster.gpu: name the kind of GPU, such as h100; without GPUs, set cluster.mem_gb_per_task")
    layouts = best_layouts(experiment, machine, request)
    if not layouts:
        raise ConfigError(f"models.{name}: {nothing_fits(Workload.of(experiment, machine), machine, request)}")
    nodes_and_tasks(name, layouts[0][1], cluster)
    folder, chosen = (settings.run / "autotune" / name).resolve(), layouts[: options.top]
    trials = [trial_name(changed, machine, cluster.container, options.steps) for _, changed in chosen]
    models = {trial: changed for trial, (_, changed) in zip(trials, chosen, strict=True)}
    own = settings.model_copy(update={"run": folder, "models": models, "train_models": []})
    folder.mkdir(parents=True, exist_ok=True)
    of = f"{len(layouts)} layouts of {request.gpus} x {machine.name}, {options.steps} steps each"
    print(f"{name}: the best {len(trials)} of {of}; results in {folder}", flush=True)
    best: tuple[Prediction, dict[str, float]] | None = None
    for number, (trial, (prediction, _)) in enumerate(zip(trials, chosen, strict=True), 1):
        output = folder / f"{trial}.json"
        if not (found := _result(output).get("measured")):
            failed = _measure(own, trial, output, options)
            found = _result(output).get("measured")
        print(f"{number:2}  {_figures(prediction, found) if found else f'failed: {failed}'}", flush=True)
        print(f"    {prediction.layout}", flush=True)
        if found and (best is None or found["tokens_per_second"] > best[1]["tokens_per_second"]):
            best = prediction, found
    if best is None:
        raise JobError(f"{name}: none of {len(trials)} layouts could be measured; {failed}")
    return best


def _measure(own: Settings, trial: str, output: Path, options: argparse.Namespace) -> str:
    """Run the job of a layout; returns why there is no result, if there is none."""
    output.unlink(missing_ok=True)  # the failure of an earlier start
    probing = ("--steps", str(options.steps), "--output", str(output))
    snapshot = make_snapshot(own, own.run)
    training = TrainingJob(str(snapshot / "settings.yaml"), trial, "training.probe", probing, requeue=False)
    try:
        job, state = _run_to_end(own, training, options.minutes, output)
    except ToolkitError as error:  # Slurm refuses it, or would never start it
        return str(error)
    path, lines = log_tail(job, 3)
    return f"{_result(output).get('failed') or f'no result ({state})'}; log: {path} {' | '.join(lines)}"


def _run_to_end(own: Settings, training: TrainingJob, minutes: int, output: Path) -> tuple[Job, str]:
    """Run a job; returns it, and how Slurm says it ended. It is ended if this process is.

    Once it has ended, its file `output` may take a while to appear. Raises JobError if Slurm would never start it.
    """
    name, job, ended = training.model, start(own, training, minutes), 0.0
    try:
        for known in poll(name, job):
            seen = (known or {}).get(job.id)
            if seen is not None and seen.unschedulable:
                raise JobError(f"{name}: {slurm.never_starts(seen)}")
            if known is None or (seen is not None and seen.active):
                continue
            ended = ended or time.monotonic()
            if output.exists() or job.executor == "local" or time.monotonic() > ended + _LAG:
                return job, seen.state if seen is not None else "ended"
    except BaseException:
        end(job)
        raise
    raise AssertionError


def _result(output: Path) -> dict[str, Any]:
    """What the probe wrote: {"measured": figures}, {"failed": reason}; empty if it has not."""
    return dict(read_json(output)) if output.exists() else {}


def _figures(prediction: Prediction, found: dict[str, float]) -> str:
    """What was measured and predicted; on CPUs, speed is not predicted."""
    held = readable_bytes(prediction.memory_bytes)
    speed = f"{prediction.tokens_per_second:,.0f} tokens/s, " * (prediction.machine.device != "cpu")
    measured = f"{found['tokens_per_second']:,.0f} tokens/s, {readable_bytes(found['memory'])}"
    return f"{measured} (predicted {speed}{held})"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.autotune", __doc__)
    cli.add_model_settings(parser)
    number = cli.positive_int
    parser.add_argument("--gpus", type=number, metavar="N", help="GPUs, or processes on CPUs (default: as configured)")
    parser.add_argument("--micro-batch-size", type=number, default=0, metavar="N", help="only this one (default: any)")
    parser.add_argument("--top", type=number, default=5, metavar="K", help="layouts to measure (default 5)")
    parser.add_argument("--steps", type=number, default=5, metavar="N", help="steps to time (default 5)")
    parser.add_argument("--minutes", type=number, default=10, metavar="M", help="time limit of a layout (default 10)")
    parser.add_argument("--write", type=cli.output_file, metavar="FILE", help="the keys of the fastest layout, as YAML")
    arguments = parser.parse_args(argv)
    settings, name = cli.read_settings(arguments), arguments.model
    experiment = settings.models[name]
    gpus = arguments.gpus or processes_of(experiment, settings.cluster)
    request = PlanRequest(gpus, experiment.train.global_batch_size, arguments.micro_batch_size)
    prediction, found = autotune(settings, name, request, arguments)
    text = config_text(name, prediction.layout)
    print(f"fastest: {prediction.layout} with {found['tokens_per_second']:,.0f} tokens/s")
    if arguments.write is None:
        print(text, end="")
    else:
        write_text(arguments.write, f"# measured by python -m cluster.autotune\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
