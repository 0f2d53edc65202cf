"""Measure the layouts with the fastest predictions, compare both, and choose the fastest layout.

    python -m cluster.autotune --config config.yaml --model tiny --gpus 2
    python -m cluster.autotune --config config.yaml --model tiny --given parallel.tensor=1
    python -m cluster.autotune --config run.yaml --model gpt2_345m --top 8 --write best.yaml

The planner ranks the layouts. Each of the best `--top` runs a few steps on random tokens, one job
after the other, on Slurm or on this machine, as `cluster.submit` would start it. A layout that
fails is reported, and the next one is measured. `--write` gets the keys of the layout with the most
tokens per second.

RUN/autotune/NAME has one result per layout, layout_HASH.json; the hash covers everything that the
result depends on. A rerun measures only what is missing. Ctrl-C ends the job. Exit code 2: no
layout could be measured.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster import slurm
from cluster.cancel import kill
from cluster.executors import nodes_and_tasks
from cluster.jobs import FINAL, log_tail, states
from cluster.submission import make_snapshot, start
from cluster.training_job import TrialJob
from common import cli
from common.console import readable_bytes, text_table
from common.errors import ConfigError, InputError, JobError, ToolkitError
from common.files import read_json, short_hash, write_text
from common.settings import Experiment, Settings
from training.planning.fit import nothing_fits
from training.planning.layout import Layout, PlanRequest, Workload
from training.planning.machines import Machine, machine_of_job, processes_of
from training.planning.search import search
from training.planning.table import config_text


def best_layouts(name: str, experiment: Experiment, machine: Machine, request: PlanRequest) -> list[Layout]:
    """The layouts that fit and that other keys allow, fastest first. ConfigError if none does."""
    workload, layouts = Workload.of(experiment, machine), []
    for prediction in search(workload, machine, request):
        try:
            prediction.layout.apply(experiment)
        except ValueError:  # another key rules it out, such as train.compile
            continue
        layouts.append(prediction.layout)
    if not layouts:
        raise ConfigError(f"models.{name}: {nothing_fits(workload, machine, request)}")
    return layouts


def autotune(
    settings: Settings, name: str, machine: Machine, layouts: Sequence[Layout], steps: int, minutes: int
) -> tuple[Layout, dict[str, Any]]:
    """Measure the layouts, and print each result; returns the fastest layout and its result.

    `minutes`: the time limit of each. Raises JobError if none could be measured.
    """
    cluster, experiment = settings.cluster, settings.models[name]
    folder = (settings.run / "autotune" / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    trials = [layout.apply(experiment) for layout in layouts]
    models = {_trial_name(trial, machine, cluster.container, steps): trial for trial in trials}
    trial_settings = settings.model_copy(update={"run": folder, "models": models, "train_models": []})
    print(f"{steps} steps of each layout; results in {folder}", flush=True)
    measured: dict[Layout, dict[str, Any]] = {}
    for number, (layout, trial) in enumerate(zip(layouts, models, strict=True), 1):
        output, line = folder / f"{trial}.json", ""
        if "measured" not in _result(output):
            line = f"failed: {_measure(trial_settings, trial, steps, minutes, output)}"
        result = _result(output)
        if "measured" in result:
            measured[layout] = result
            line = f"{_one_line(result['measured'])} (predicted {_one_line(result['predicted'])})"
        print(f"{number:2}  {line}\n    {layout}", flush=True)
    if not measured:
        raise JobError(f"{name}: none of {len(layouts)} layouts could be measured; the last one {line}")
    return max(measured.items(), key=lambda item: item[1]["measured"]["tokens_per_second"])


def _trial_name(experiment: Experiment, machine: Machine, container: str, steps: int) -> str:
    """A hash of everything that a result depends on."""
    keys = experiment.model_dump_json(include={"model", "parallel", "train"})
    return f"layout_{short_hash(repr([keys, machine.name, machine.per_node, container, steps, version('torch')]))}"


def _measure(settings: Settings, trial: str, steps: int, minutes: int, output: Path) -> str:
    """Run the job of a layout; returns why there is no result, if there is none."""
    output.unlink(missing_ok=True)  # the failure of an earlier start
    config = str(make_snapshot(settings, settings.run) / "settings.yaml")
    try:
        job = start(settings, TrialJob(config, trial, steps=steps, output=str(output)), minutes)
    except ToolkitError as error:  # Slurm refuses it
        return str(error)
    try:
        for state, queued in states(settings.model_folder(trial), job, output):
            if queued is not None and queued.unschedulable:
                kill(job)
                return slurm.never_starts(queued)
            if state.state in FINAL:
                break
    except BaseException:  # an interrupt
        kill(job)
        raise
    path, lines = log_tail(job, 3)
    return f"{_result(output).get('failed') or f'no result ({state})'}; log: {path} {' | '.join(lines)}"


def _result(output: Path) -> dict[str, Any]:
    """The result that `training.trial` wrote; empty if there is none."""
    return dict(read_json(output)) if output.exists() else {}


def _one_line(figures: dict[str, Any]) -> str:
    """Speed and memory; on CPUs, speed is not predicted."""
    speed = figures["tokens_per_second"]
    return (f"{speed:,.0f} tokens/s, " if speed else "") + readable_bytes(figures["memory"])


def figures_table(result: dict[str, Any]) -> str:
    """One row per figure: predicted, measured, and the error in per cent of the measured value."""
    size = readable_bytes
    rows = {
        "parameters": ("parameters", size),
        "optimizer": ("optimizer", size),
        "transient": ("gradients, activations, loss, communication", size),
        "context": ("allocator and context", size),
        "memory": ("memory of the fullest process", size),
        "step_seconds": ("step", lambda seconds: f"{1000 * seconds:,.1f} ms"),
        "tokens_per_second": ("tokens/s", "{:,.0f}".format),
        "mfu": ("MFU", "{:.1%}".format),
    }
    lines = [("", "predicted", "measured", "error")]
    for key, (name, form) in rows.items():
        predicted, measured = result["predicted"][key], result["measured"][key]
        if predicted is None:
            lines.append((name, "not predicted", form(measured), "-"))
        else:
            error = f"{100 * (predicted - measured) / measured:+.1f} %" if measured else "-"
            lines.append((name, form(predicted), form(measured), error))
    return text_table(lines, "lrrr")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.autotune", __doc__)
    cli.add_model_settings(parser)
    number = cli.positive_int
    parser.add_argument("--given", action="store_true", help="measure only the layout of the configuration")
    parser.add_argument("--gpus", type=number, metavar="N", help="GPUs, or processes on CPUs (default: as configured)")
    parser.add_argument("--micro-batch-size", type=number, default=0, metavar="N", help="only this one (default: any)")
    parser.add_argument("--top", type=number, default=5, metavar="K", help="layouts to measure (default 5)")
    parser.add_argument("--steps", type=number, default=5, metavar="N", help="steps to time (default 5)")
    parser.add_argument("--minutes", type=number, default=10, metavar="M", help="time limit of a layout (default 10)")
    parser.add_argument("--write", type=cli.output_file, metavar="FILE", help="the keys of the fastest layout, as YAML")
    arguments = parser.parse_args(argv)
    settings, name = cli.read_settings(arguments), arguments.model
    cluster, experiment = settings.cluster, settings.models[name]
    machine = machine_of_job(experiment, cluster)
    if machine is None:
        raise ConfigError("cluster.gpu: name the kind of GPU, such as h100; without GPUs, set cluster.mem_gb_per_task")
    if arguments.given:
        if arguments.gpus or arguments.micro_batch_size:
            raise InputError("--given takes both from the configuration; leave --gpus and --micro-batch-size out")
        layouts = [Layout.of(experiment)]
        print(f"{name}: the given layout on {layouts[0].world_size} x {machine.name}", flush=True)
    else:
        gpus = arguments.gpus or processes_of(experiment, cluster)
        request = PlanRequest(gpus, experiment.train.global_batch_size, arguments.micro_batch_size)
        fitting = best_layouts(name, experiment, machine, request)
        layouts = fitting[: arguments.top]
        print(f"{name}: the best {len(layouts)} of {len(fitting)} layouts of {gpus} x {machine.name}", flush=True)
    nodes_and_tasks(name, layouts[0].apply(experiment), cluster)
    layout, result = autotune(settings, name, machine, layouts, arguments.steps, arguments.minutes)
    print(f"\nfastest: {layout} with {result['measured']['tokens_per_second']:,.0f} tokens/s\n{figures_table(result)}")
    text = config_text(name, layout)
    if arguments.write is None:
        print(f"\n{text}", end="")
    else:
        write_text(arguments.write, f"# measured by python -m cluster.autotune\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
