"""Measure the layouts that the planner expects to be the fastest, and choose the one that is.

    python -m cluster.autotune --config config.yaml --model tiny --gpus 2
    python -m cluster.autotune --config run.yaml --model gpt2_345m --gpus 16 --top 8 --side-by-side 4 --write best.yaml

Each of the best `--top` predicted layouts runs a few steps as a job of its own, as `cluster.submit` would start it: on
Slurm or on this machine, one after the other or, on Slurm, several side by side. A layout that fails, hangs or runs out
of memory is reported, and the others go on. State lies in RUN/autotune/NAME: the same command, started again, goes on
where it was interrupted, and runs nothing twice. Slurm's jobs survive Ctrl-C; jobs on this machine end with it.
`--write` gets the keys of the layout with the most tokens per second. Exit code 2: no layout could be measured.
"""

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib import metadata
from typing import Any

from cluster.snapshot import make_snapshot
from cluster.submit import Launch, job_name, nodes_and_tasks
from cluster.trials import Result, Trial, read_result, run_trials
from common import cli
from common.errors import ConfigError, InputError, JobError
from common.files import open_locked, write_text
from common.settings import Experiment, Settings
from common.tables import readable_bytes
from common.workers import available_cpus
from training.planning.comparison import error_percent, signed_percent
from training.planning.document import config_text
from training.planning.machines import GIB, Machine, cpu_machine, machine
from training.planning.refusal import nothing_fits
from training.planning.search import Prediction, Question, search
from training.planning.table import short
from training.planning.this_machine import available_memory, processes_of
from training.planning.workload import Workload

_CORE_FLOPS = 5e10  # FLOP/s of a CPU core in float32: a constant, so that the same command finds the same layouts


def machine_of(settings: Settings, kind: str) -> Machine:
    """The machine that the configured jobs run on. Raises ConfigError if its kind of GPU is not named."""
    cluster = settings.cluster
    if cluster.gpus_per_node:
        if not kind and not cluster.gpu:
            raise ConfigError("cluster.gpu: name the kind of GPU, such as h100, or give --gpu")
        return machine(kind or cluster.gpu, cluster.gpus, cluster.gpus_per_node)
    if kind:
        raise ConfigError(f"cluster.gpus_per_node is 0, but --gpu is {kind}; set one, or leave --gpu out for CPUs")
    tasks = cluster.tasks_per_node
    memory = cluster.mem_gb_per_task * tasks * GIB if cluster.executor == "slurm" else 0  # Slurm's G
    cores = cluster.cpus_per_task * tasks or available_cpus()
    return cpu_machine(tasks, memory or available_memory(), _CORE_FLOPS * cores)


def best_layouts(experiment: Experiment, machine: Machine, question: Question) -> list[tuple[Prediction, Experiment]]:
    """The layouts that fit, the fastest first, each with the experiment in it."""
    found = []
    for prediction in search(Workload.of(experiment, machine), machine, question):
        try:
            found.append((prediction, prediction.layout.apply(experiment)))
        except ValueError:  # another key rules it out, such as train.compile
            continue
    return found


def trial_name(experiment: Experiment, machine: Machine, container: str, steps: int) -> str:
    """A hash of everything that a result depends on."""
    subject = {
        "experiment": experiment.model_dump(mode="json", include={"model", "parallel", "train"}),
        "machine": [machine.name, machine.per_node, container],
        "steps": steps,
        "versions": [_version("torch"), _version("urls-to-gpt2"), platform.python_version()],
    }
    return f"layout_{hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:12]}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


def autotune(settings: Settings, name: str, question: Question, options: argparse.Namespace) -> tuple[Trial, Result]:
    """Measure the best layouts, print them as they come, and return the fastest.

    Raises ConfigError if no layout fits, and JobError if none could be measured.
    """
    cluster, experiment = settings.cluster, settings.models[name]
    if options.side_by_side > 1 and cluster.executor == "local":
        raise InputError("--side-by-side: jobs on one machine would slow each other down; use cluster.executor: slurm")
    kind = machine_of(settings, options.gpu)
    layouts = best_layouts(experiment, kind, question)
    if not layouts:
        raise ConfigError(f"models.{name}: {nothing_fits(Workload.of(experiment, kind), kind, question)}")
    nodes_and_tasks(name, layouts[0][1], cluster)
    folder = (settings.run / "autotune" / name).resolve()
    trials = [
        Trial(trial_name(changed, kind, cluster.container, options.steps), prediction, changed, folder)
        for prediction, changed in layouts[: options.top]
    ]
    folder.mkdir(parents=True, exist_ok=True)
    refusal = f"{folder}: another cluster.autotune of this model is running; wait for it, or stop it"
    with open_locked(folder / "lock", refusal):
        print(
            f"{name}: the best {len(trials)} of {len(layouts)} layouts of {question.gpus} x {kind.name}, "
            f"{options.steps} steps each; results in {folder}\n{_row(_HEAD)}",
            flush=True,
        )
        return _fastest(name, _measure(settings, trials, options))


def _measure(settings: Settings, trials: Sequence[Trial], options: argparse.Namespace) -> list[tuple[Trial, Result]]:
    """Run the trials without a result; prints and returns all results."""
    folder, results = trials[0].folder, []
    for trial in trials:
        known = read_result(trial)
        if known is not None and known.failed and options.retry:
            trial.output.unlink()
        elif known is not None:
            results.append((trial, known))
            _print_row(trials, trial, known, "  (from an earlier start)")
    left = [trial for trial in trials if trial not in [done for done, _ in results]]
    models = {trial.name: trial.experiment for trial in trials}
    own = settings.model_copy(update={"run": folder, "models": models, "train_models": []})
    snapshot = make_snapshot(own, folder) if left else folder

    def launch(trial: Trial) -> Launch:
        probing = ["--steps", str(options.steps), "--output", str(trial.output)]
        full_name = job_name(own, trial.name)
        minutes = options.minutes + (own.cluster.executor == "local")  # run_trials ends it before submitit does
        return Launch(own, trial.name, snapshot, full_name, "training.probe", minutes, options=probing)

    with closing(run_trials(left, launch, options.minutes, options.side_by_side)) as running:
        for trial, result in running:
            results.append((trial, result))
            _print_row(trials, trial, result)
    return results


def _fastest(name: str, results: Sequence[tuple[Trial, Result]]) -> tuple[Trial, Result]:
    """The trial with the most tokens per second. Raises JobError with the end of a log if there is none."""
    measured = [(trial, result) for trial, result in results if result.measured]
    if measured:
        return max(measured, key=lambda each: (each[1].measured or {})["tokens_per_second"])
    _, last = results[-1]
    log = f"; log: {last.log}" if last.log else ""
    quoted = "".join(f"\n    {line}" for line in last.tail)
    raise JobError(f"{name}: none of {len(results)} layouts could be measured; {last.failed}{log}{quoted}")


# ------------------------------------------------------------------------------------------------------------- output

_HEAD = ("", "predicted tokens/s", "measured", "error", "predicted memory", "measured", "error", "layout")
_WIDTHS = (2, 18, 10, 9, 16, 11, 9)


def _row(cells: Sequence[str]) -> str:
    """A line of the table, of fixed widths because the lines come one by one."""
    *numbers, layout = cells
    return "  ".join([*(cell.rjust(width) for cell, width in zip(numbers, _WIDTHS, strict=True)), layout])


def _print_row(trials: Sequence[Trial], trial: Trial, result: Result, note: str = "") -> None:
    prediction, found = trial.prediction, result.measured
    speed, memory = prediction.tokens_per_second, prediction.memory_bytes
    layout = short(prediction.layout)
    cells = [str(trials.index(trial) + 1), f"{speed:,.0f}", "-", "-", readable_bytes(memory), "-", "-", layout]
    if found:
        cells[2], cells[3] = _pair(speed, found["tokens_per_second"], "{:,.0f}".format)
        cells[5], cells[6] = _pair(memory, found["memory"], readable_bytes)
    if prediction.machine.device == "cpu":
        cells[1], cells[3] = "-", "-"
    failure = "" if found else f"\n      failed: {result.failed}{f'; log: {result.log}' if result.log else ''}"
    print(f"{_row(cells)}{note}{failure}", flush=True)


def _pair(predicted: float, measured: float, form: Any) -> tuple[str, str]:
    return form(measured), signed_percent(error_percent(predicted, measured))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("cluster.autotune", __doc__)
    cli.add_model_settings(parser)
    number = cli.positive_int
    parser.add_argument("--gpus", type=number, metavar="N", help="GPUs, or processes on CPUs (default: as configured)")
    parser.add_argument("--gpu", default="", metavar="KIND", help="their kind (default: cluster.gpu)")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--global-batch-size", type=number, metavar="N", help="samples per step (default: as configured)"
    )
    batch.add_argument("--max-global-batch-size", type=number, metavar="N", help="at most so many samples per step")
    parser.add_argument("--micro-batch-size", type=number, default=0, metavar="N", help="only this one (default: any)")
    parser.add_argument("--top", type=number, default=5, metavar="K", help="layouts to measure (default 5)")
    parser.add_argument("--steps", type=number, default=5, metavar="N", help="steps to time (default 5)")
    parser.add_argument("--minutes", type=number, default=10, metavar="M", help="time limit of a layout (default 10)")
    parser.add_argument("--side-by-side", type=number, default=1, metavar="J", help="Slurm jobs at once (default 1)")
    parser.add_argument("--retry", action="store_true", help="run layouts again that failed in an earlier start")
    parser.add_argument("--write", type=cli.output_file, metavar="FILE", help="the keys of the fastest layout, as YAML")
    arguments = parser.parse_args(argv)
    settings, name = cli.read_settings(arguments), arguments.model
    experiment, most = settings.models[name], arguments.max_global_batch_size
    question = Question(
        arguments.gpus or processes_of(experiment, settings.cluster),
        most or arguments.global_batch_size or experiment.train.global_batch_size,
        at_most=most is not None,
        micro_batch_size=arguments.micro_batch_size,
    )
    trial, result = autotune(settings, name, question, arguments)
    assert result.measured is not None
    layout = trial.prediction.layout
    text = config_text(name, layout)
    print(f"fastest: {short(layout)} with {result.measured['tokens_per_second']:,.0f} tokens/s")
    if arguments.write is None:
        print(text, end="")
    else:
        write_text(arguments.write, f"# measured by python -m cluster.autotune\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
