"""Find the parallel layouts of a model that fit a machine, ranked by predicted speed; runs nothing.

    python -m training.plan --model gpt2_345m --gpus 64 --gpu h100 --global-batch-size 512
    python -m training.plan --config configs/openwebtext.yaml --model gpt2_7b --given --explain
    python -m training.plan --model gpt2_7b --gpus 48 --global-batch-size 960 --write best.yaml

Without --config, NAME is a published size: gpt2_124m, gpt2_345m, gpt2_774m, gpt2_1_5b, gpt2_7b,
gpt2_22b, gpt2_175b. With --config, the model, its batch, and the number and kind of its GPUs
(cluster.gpu) are those of the configuration, unless an option says otherwise. A layout is feasible
below 80 % of a GPU's memory, and tight up to 92 %. docs/planning_model.md has the formulas and
their errors; `python -m cluster.autotune` measures.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from common import cli
from common.config import load_settings, validate, with_overrides
from common.errors import ConfigError, InputError
from common.files import write_text
from common.settings import Experiment, Settings, closest
from training.planning.elastic import extremes, process_counts
from training.planning.fit import does_not_fit, nothing_fits
from training.planning.layout import PlanRequest, Workload
from training.planning.machines import Machine, judges_this_machine, known_gpus, machine, processes_of, this_cpu
from training.planning.search import Prediction, predict, search
from training.planning.table import (
    config_text,
    explain,
    fact_table,
    gpu_table,
    layout_table,
    memory_table,
    plan_document,
)

_DEFAULT_GPU = "h100"
_CPUS = "cpu"
_THOUSANDS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

# Published sizes of GPT-2 and of larger models of its kind: n_layer, n_embd, n_head, seq_len,
# global batch size
_SIZES = {
    "gpt2_124m": (12, 768, 12, 1024, 512),  # Radford et al. 2019, the first four; 512: Megatron-LM's recipe
    "gpt2_345m": (24, 1024, 16, 1024, 512),  # 354,823,168 parameters, also called 355M
    "gpt2_774m": (36, 1280, 20, 1024, 512),
    "gpt2_1_5b": (48, 1600, 25, 1024, 512),
    "gpt2_7b": (32, 4096, 32, 2048, 1024),
    "gpt2_22b": (48, 6144, 64, 2048, 1024),  # Korthikanti et al. 2022, table 3
    "gpt2_175b": (96, 12288, 96, 2048, 1536),  # Brown et al. 2020; the batch of Narayanan et al. 2021
}
_ITERATIONS = 320_000  # x 512 x 1,024 = 168 B tokens: Megatron-LM's recipe for 345M


def _count(text: str) -> float:
    """Type of --tokens: 3e11 for `300B` or `3e11`."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([KMBT]?)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of tokens, such as 300B or 3e11")
    return float(match[1]) * _THOUSANDS[match[2]]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("training.plan", __doc__)
    cli.add_model_settings(parser, required=False)
    hardware = parser.add_argument_group("machine")
    hardware.add_argument("--gpus", type=cli.positive_int, metavar="N", help="number of GPUs (default: one node)")
    hardware.add_argument("--gpus-per-node", type=cli.positive_int, metavar="N", help="default: usual for the kind")
    hardware.add_argument(
        "--gpu",
        metavar="KIND",
        help=f"kind of the GPUs (default {_DEFAULT_GPU}); see --list-gpus. {_CPUS}: this machine",
    )
    hardware.add_argument("--list-gpus", action="store_true", help="print the known kinds and exit")
    model = parser.add_argument_group("model and batch")
    model.add_argument("--global-batch-size", type=cli.positive_int, metavar="N", help="samples per step")
    model.add_argument("--micro-batch-size", type=cli.positive_int, metavar="N", help="only this one (default: any)")
    model.add_argument("--tokens", type=_count, metavar="N", help="length of the training, such as 300B or 3e11")
    output = parser.add_argument_group("output")
    output.add_argument("--given", action="store_true", help="only the layout of the configuration: does it fit?")
    output.add_argument("--top", type=cli.positive_int, default=10, metavar="N", help="layouts to show (default 10)")
    output.add_argument("--explain", action="store_true", help="every term of the first layout")
    output.add_argument("--json", action="store_true", help="print one JSON document with everything instead")
    output.add_argument("--write", type=cli.output_file, metavar="FILE", help="the first layout as configuration keys")
    arguments = parser.parse_args(argv)
    if arguments.list_gpus:
        own = load_settings(arguments.config).cluster.gpus if arguments.config else {}
        print(gpu_table({**known_gpus(), **own}))
        return 0
    if arguments.model is None:
        parser.error("the following arguments are required: --model")
    name = arguments.model
    settings = cli.read_settings(arguments) if arguments.config else _published_settings(name, arguments.overrides)
    experiment = settings.experiment(name)
    gpus = _machine(arguments, settings, experiment)
    workload, request = Workload.of(experiment, gpus), _request(arguments, experiment, gpus.per_node)
    ranked = _configured(settings, name, gpus) if arguments.given else search(workload, gpus, request)
    if not ranked:
        raise InputError(f"{name}: {nothing_fits(workload, gpus, request)}")
    tokens = arguments.tokens or experiment.train.iterations * request.global_batch_size * experiment.model.seq_len
    _show(arguments, request, ranked, tokens)
    if arguments.given and (large := [prediction for prediction in ranked if not prediction.fits]):
        request = PlanRequest(large[0].layout.world_size, request.global_batch_size)
        raise ConfigError(f"{name}: {does_not_fit(large[0], request)}")
    return 0


def _configured(settings: Settings, name: str, gpus: Machine) -> list[Prediction]:
    """The configured layout, and that of a start on the fewest nodes (`cluster.min_nodes`)."""
    counts = process_counts(name, settings.experiment(name), settings.cluster)
    return [predict(start.experiment(name), gpus) for start in extremes(settings, name, counts, gpus)]


def _show(arguments: argparse.Namespace, request: PlanRequest, ranked: list[Prediction], tokens: float) -> None:
    """Print the best layouts for a training of `tokens`, and write the requested files."""
    name, best = arguments.model, ranked[0]
    shown, fitting = ranked[: arguments.top], sum(prediction.fits for prediction in ranked)
    if arguments.json:
        import orjson

        document = plan_document(name, request, shown, fitting, tokens)
        print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        print("\n\n".join((fact_table(name, request, best, tokens), layout_table(shown, tokens), memory_table(shown))))
        if not arguments.given:
            print(f"\n{fitting} layouts fit and are not dominated by another.")
        if arguments.explain:
            print(f"\n{explain(best)}")
    if arguments.write and fitting:
        remark = f"# {name} on {request.gpus} x {best.machine.name}: predicted by python -m training.plan\n"
        write_text(arguments.write, remark + config_text(name, best.layout))


def _published_settings(name: str, overrides: Iterable[str]) -> Settings:
    """Settings with one model of a published size. Raises InputError for an unknown name."""
    if name not in _SIZES:
        raise InputError(
            f"--model {name}: no published size has this name{closest(name, _SIZES)}; known: {', '.join(_SIZES)}; "
            "--config FILE names a configuration with other models"
        )
    layers, width, heads, seq_len, batch = _SIZES[name]
    experiment: dict[str, Any] = {
        "model": {"n_layer": layers, "n_embd": width, "n_head": heads, "seq_len": seq_len},
        "train": {"iterations": _ITERATIONS, "global_batch_size": batch},
    }
    raw = {"run": "results", "urls": ["-"], "models": {name: experiment}}
    return validate(with_overrides(raw, overrides, name), "command line")


def _machine(arguments: argparse.Namespace, settings: Settings, experiment: Experiment) -> Machine:
    """The machine to plan for: GPUs, or this machine's CPUs."""
    cluster = settings.cluster
    here = arguments.config is not None and judges_this_machine(cluster)
    name = arguments.gpu or cluster.gpu or (_CPUS if here else _DEFAULT_GPU)
    if name == _CPUS:
        configured = processes_of(experiment, cluster) if arguments.config else 1
        return this_cpu(arguments.gpus or configured, cluster.cpus_per_task)
    return machine(name, cluster.gpus, arguments.gpus_per_node or cluster.gpus_per_node)


def _request(arguments: argparse.Namespace, experiment: Experiment, per_node: int) -> PlanRequest:
    """The number of GPUs and the batch."""
    batch = arguments.global_batch_size
    if arguments.given and (arguments.gpus or batch or arguments.micro_batch_size):
        raise InputError(
            "--given takes GPUs and batch from the configuration; leave --gpus and the batch options out, or "
            "replace keys: parallel.data=N train.global_batch_size=N"
        )
    configured = experiment.world_size if arguments.given or arguments.config else 0
    gpus = arguments.gpus or configured or per_node
    if gpus > per_node and gpus % per_node:
        below = gpus // per_node * per_node
        cure = "" if arguments.given else f"--gpus {below} or {below + per_node}, or "
        raise InputError(f"{gpus} GPUs do not fill whole nodes of {per_node}; give {cure}another --gpus-per-node")
    return PlanRequest(gpus, batch or experiment.train.global_batch_size, arguments.micro_batch_size or 0)


if __name__ == "__main__":
    sys.exit(cli.run(main))
