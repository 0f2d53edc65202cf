"""Measure the layouts with the fastest predictions, and choose the fastest one.

    python -m cluster.autotune --config config.yaml --model tiny --gpus 2
    python -m cluster.autotune --config run.yaml --model gpt2_345m --gpus 16 --top 8 --write best.yaml

Runs a few steps of each of the best `--top` predicted layouts with `training.probe`, one job after the other, submitted
like those of `cluster.submit`. A layout that fails is reported, and the next ones are measured. RUN/autotune/NAME
has a result per layout, layout_HASH.json; the hash covers everything that it depends on. A rerun measures only what is
missing. Ctrl-C ends the job. `--write` gets the keys of the layout with the most tokens per
second. Exit code 2: no layout could be measured.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster import slurm
from cluster.cancel import kill
from cluster.executors import nodes_and_tasks
from cluster.jobs import FINAL, Job, State, log_tail, states
from cluster.submission import make_snapshot, start
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


def best_layouts(experiment: Experiment, machine: Machine, request: PlanRequest) -> list[tuple[Prediction, Experiment]]:
    """The layouts that fit, fastest first, each with the experiment in that layout."""
    layouts = []
    for prediction in search(Workload.of(experiment, machine), machine, request):
        try:
            layouts.append((prediction, prediction.layout.apply(experiment)))
        except ValueError:  # another key rules it out, such as train.compile
            continue
    return layouts


def trial_name(experiment: Experiment, machine: Machine, container: str, steps: int) -> str:
    """A hash of everything that a result depends on."""
    keys = experiment.model_dump_json(include={"model", "parallel", "train"})
    return f"layout_{short_hash(repr([keys, machine.name, machine.per_node, container, steps, version('torch')]))}"


def autotune(
    settings: Settings, name: str, request: PlanRequest, options: argparse.Namespace
) -> tuple[Prediction, dict[str, float]]:
    """Measure the best layouts, and print each result; returns the fastest layout and its figures.

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
    trial_settings = settings.model_copy(update={"run": folder, "models": models, "train_models": []})
    folder.mkdir(parents=True, exist_ok=True)
    total = f"{len(layouts)} layouts of {request.gpus} x {machine.name}, {options.steps} steps each"
    print(f"{name}: the best {len(trials)} of {total}; results in {folder}", flush=True)
    best: tuple[Prediction, dict[str, float]] | None = None
    for number, (trial, (prediction, _)) in enumerate(zip(trials, chosen, strict=True), 1):
        output = folder / f"{trial}.json"
        if not (measured := _result(output).get("measured")):
            failed = _measure(trial_settings, trial, output, options)
            measured = _result(output).get("measured")
        print(f"{number:2}  {_figures(prediction, measured) if measured else f'failed: {failed}'}", flush=True)
        print(f"    {prediction.layout}", flush=True)
        if measured and (best is None or measured["tokens_per_second"] > best[1]["tokens_per_second"]):
            best = prediction, measured
    if best is None:
        raise JobError(f"{name}: none of {len(trials)} layouts could be measured; {failed}")
    return best


def _measure(settings: Settings, trial: str, output: Path, options: argparse.Namespace) -> str:
    """Run the job of a layout; returns why there is no result, if there is none."""
    output.unlink(missing_ok=True)  # the failure of an earlier start
    probe_options = ("--steps", str(options.steps), "--output", str(output))
    snapshot = make_snapshot(settings, settings.run)
    training = TrainingJob(str(snapshot / "settings.yaml"), trial, "training.probe", probe_options, requeue=False)
    try:
        job = start(settings, training, options.minutes)
        state = _final_state(settings.model_folder(trial), job, output)
    except ToolkitError as error:  # Slurm refuses it, or would never start it
        return str(error)
    path, lines = log_tail(job, 3)
    return f"{_result(output).get('failed') or f'no result ({state})'}; log: {path} {' | '.join(lines)}"


def _final_state(folder: Path, job: Job, output: Path) -> State:
    """Wait for a job to end and for `output` to exist; return the final state. An interrupt cancels the job.

    Raises JobError if Slurm would never start it.
    """
    try:
        for state, queued in states(folder, job, output):
            if queued is not None and queued.unschedulable:
                raise JobError(f"{folder.name}: {slurm.never_starts(queued)}")
            if state.state in FINAL:
                return state
    except BaseException:
        kill(job)
        raise
    raise AssertionError


def _result(output: Path) -> dict[str, Any]:
    """The probe's result: {"measured": figures}, {"failed": reason}; empty if it has not."""
    return dict(read_json(output)) if output.exists() else {}


def _figures(prediction: Prediction, figures: dict[str, float]) -> str:
    """Measured and predicted figures; on CPUs, speed is not predicted."""
    memory = readable_bytes(prediction.memory_bytes)
    speed = f"{prediction.tokens_per_second:,.0f} tokens/s, " * (prediction.machine.device != "cpu")
    measured = f"{figures['tokens_per_second']:,.0f} tokens/s, {readable_bytes(figures['memory'])}"
    return f"{measured} (predicted {speed}{memory})"


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
    prediction, figures = autotune(settings, name, request, arguments)
    text = config_text(name, prediction.layout)
    print(f"fastest: {prediction.layout} with {figures['tokens_per_second']:,.0f} tokens/s")
    if arguments.write is None:
        print(text, end="")
    else:
        write_text(arguments.write, f"# measured by python -m cluster.autotune\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
