"""Find the parallel layouts of a model that fit a machine, ranked by predicted speed; nothing is run or allocated.

    python -m training.plan --model gpt2_345m --gpus 64 --gpu h100 --global-batch-size 512
    python -m training.plan --config configs/openwebtext.yaml --model gpt2_7b --given --explain
    python -m training.plan --model gpt2_7b --gpus 48 --max-global-batch-size 1000 --write best.yaml --html plan.html

Without --config, NAME is a published size: gpt2_124m, gpt2_345m, gpt2_774m, gpt2_1_5b, gpt2_7b, gpt2_22b, gpt2_175b.
With it, the model, its batch, its number of GPUs and their kind (cluster.gpu) are those of the configuration, unless an
option says otherwise. A layout is feasible below 80 % of a GPU's memory, and tight up to 92 %. docs/planning.md has the
formulas, and how well they agree with measurements.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from common import cli
from common.config import load_settings
from common.errors import ConfigError, InputError
from common.files import write_text
from common.settings import Experiment, Settings
from common.tables import text_table
from common.verbs import replace_process
from training.planning.document import config_text, plan_document
from training.planning.explain import explain
from training.planning.handover import autotune_command, probe_command
from training.planning.layout import Layout
from training.planning.machines import GIB, Machine, known_gpus, machine
from training.planning.refusal import does_not_fit, nothing_fits
from training.planning.search import Prediction, Question, search
from training.planning.sizes import published_settings
from training.planning.table import gpu_table, layout_table, memory_table, trust, why
from training.planning.this_machine import judges_this_machine, processes_of, this_cpu
from training.planning.workload import Workload

_DEFAULT_GPU = "h100"
_CPUS = "cpu"
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_THOUSANDS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Asked:
    """What the command line and the configuration ask."""

    name: str
    experiment: Experiment
    workload: Workload
    machine: Machine
    question: Question
    tokens: float
    """Tokens of the whole training."""
    assumed: bool
    """No kind of GPU was named."""

    @property
    def gpus(self) -> str:
        """`64 x h100`."""
        return f"{self.question.gpus} x {self.machine.name}"

    def facts(self) -> list[tuple[str, str]]:
        """The lines above the tables."""
        model, question, machine = self.workload.model, self.question, self.machine
        return [
            (
                "model",
                f"{self.name}: {model.n_layer} layers, {model.n_embd} wide, {model.n_head} heads, "
                f"sequence {model.seq_len}; {model.parameters:,} parameters; {self.workload.precision}",
            ),
            (
                "CPUs" if machine.device == "cpu" else "GPUs",
                f"{self.gpus} with {machine.memory / GIB:.1f} GiB, {min(machine.per_node, question.gpus)} per node"
                f"{' (assumed: --gpu names another kind)' * self.assumed}",
            ),
            ("step", f"{'at most ' * question.at_most}{question.global_batch_size:,} samples"),
            ("run", f"{self.tokens / 1e9:,.1f} B tokens" if self.tokens >= 1e9 else f"{self.tokens:,.0f} tokens"),
        ]


def _memory(text: str) -> int:
    """Type of --gpu-memory: `80GiB` as bytes."""
    match = re.fullmatch(rf"([0-9.]+) ?({'|'.join(_UNITS)})", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number with its unit, such as 80GiB or 24GB")
    return int(float(match[1]) * _UNITS[match[2]])


def _count(text: str) -> float:
    """Type of --tokens: `300B` or `3e11` as a number."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([KMBT]?)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of tokens, such as 300B or 3e11")
    return float(match[1]) * _THOUSANDS[match[2]]


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = cli.parser("training.plan", __doc__)
    cli.add_model_settings(parser, required=False)
    machine = parser.add_argument_group("machine")
    machine.add_argument("--gpus", type=cli.positive_int, metavar="N", help="number of GPUs (default: one node)")
    machine.add_argument("--gpus-per-node", type=cli.positive_int, metavar="N", help="default: usual for the kind")
    machine.add_argument(
        "--gpu",
        metavar="KIND",
        help=f"kind of the GPUs (default {_DEFAULT_GPU}); see --list-gpus. {_CPUS}: this machine",
    )
    machine.add_argument("--gpu-memory", type=_memory, metavar="SIZE", help="such as 40GiB, instead of the kind's")
    machine.add_argument(
        "--peak-tflops",
        type=_positive,
        metavar="N",
        help="dense peak at the precision of the model, instead of the kind's",
    )
    machine.add_argument("--list-gpus", action="store_true", help="print the kinds that are known, and end")
    model = parser.add_argument_group("model and batch")
    batch = model.add_mutually_exclusive_group()
    batch.add_argument("--global-batch-size", type=cli.positive_int, metavar="N", help="samples per step")
    batch.add_argument(
        "--max-global-batch-size", type=cli.positive_int, metavar="N", help="at most so many: the best number is found"
    )
    model.add_argument("--micro-batch-size", type=cli.positive_int, metavar="N", help="only this one (default: any)")
    cli.add_key_flag(parser, "--seq-len", "model.seq_len", Experiment, metavar="N")
    cli.add_key_flag(parser, "--precision", "train.precision", Experiment, metavar="TYPE")
    model.add_argument("--tokens", type=_count, metavar="N", help="length of the training, such as 300B or 3e11")
    answer = parser.add_argument_group("answer")
    answer.add_argument("--given", action="store_true", help="only the layout of the configuration: does it fit?")
    answer.add_argument("--top", type=cli.positive_int, default=10, metavar="N", help="layouts to show (default 10)")
    answer.add_argument("--explain", action="store_true", help="every term of the first layout, with its formula")
    answer.add_argument("--json", action="store_true", help="print one JSON document with everything instead")
    answer.add_argument("--write", type=cli.output_file, metavar="FILE", help="the first layout as configuration keys")
    answer.add_argument("--html", type=cli.output_file, metavar="FILE", help="a page with figures")
    measured = parser.add_argument_group("measuring").add_mutually_exclusive_group()
    measured.add_argument("--probe", action="store_true", help="run a few steps of the given layout here instead")
    measured.add_argument("--autotune", type=cli.positive_int, metavar="K", help="run the best K as jobs instead")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.list_gpus:
        own = load_settings(arguments.config).cluster.gpus if arguments.config else {}
        print(gpu_table({**known_gpus(), **own}))
        return 0
    if arguments.model is None:
        parser.error("the following arguments are required: --model")
    words = sys.argv[1:] if argv is None else argv
    if arguments.probe:
        replace_process(probe_command(words))
    if arguments.autotune:
        replace_process(autotune_command(words))
    asked = read_question(arguments)
    ranked = [_given(asked)] if arguments.given else search(asked.workload, asked.machine, asked.question)
    if not ranked:
        raise InputError(f"{asked.name}: {nothing_fits(asked.workload, asked.machine, asked.question)}")
    _answer(asked, ranked, arguments)
    if arguments.given and not ranked[0].fits:
        raise ConfigError(f"{asked.name}: {does_not_fit(ranked[0], asked.question)}")
    return 0


def _answer(asked: Asked, ranked: list[Prediction], arguments: argparse.Namespace) -> None:
    """Print the first of the layouts, and write the files that were asked for."""
    shown = ranked[: arguments.top]
    fits = ranked[0].fits
    reason = why(ranked) if fits and not arguments.given else ranked[0].verdict.capitalize() + "."
    if arguments.json:
        import orjson

        document = plan_document(
            asked.name, asked.question, shown, sum(one.fits for one in ranked), asked.tokens, reason
        )
        print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        facts = [*asked.facts(), *trust(ranked[0])]
        tables = (text_table(facts), layout_table(shown, asked.tokens), memory_table(shown))
        print("\n\n".join((*tables, textwrap.fill(f"1: {reason}", 118, subsequent_indent="   "))))
        if not arguments.given:
            print(f"{len(ranked)} layouts fit and are not plainly worse than another.")
        if arguments.explain:
            print(f"\n{explain(ranked[0])}")
    if arguments.write and fits:
        remark = f"# {asked.name} on {asked.gpus}: predicted by python -m training.plan\n"
        write_text(arguments.write, remark + config_text(asked.name, ranked[0].layout))
    if arguments.html:
        from training.planning.page import plan_page  # matplotlib takes a second to import

        title = f"{asked.name} on {asked.gpus}"
        write_text(arguments.html, plan_page(title, [*asked.facts(), *trust(ranked[0])], shown, asked.tokens, reason))


def _given(asked: Asked) -> Prediction:
    return Prediction(asked.workload, Layout.of(asked.experiment), asked.machine)


def read_question(arguments: argparse.Namespace) -> Asked:
    """What is asked, from the options and the configuration. Raises ConfigError or InputError."""
    if arguments.config is None:
        settings = published_settings(arguments.model, arguments.overrides)
    else:
        settings = cli.read_settings(arguments)
    experiment = settings.experiment(arguments.model)
    gpus = _machine(arguments, settings, experiment)
    assumed = gpus.name == _DEFAULT_GPU and not (arguments.gpu or settings.cluster.gpu)
    question = _question(arguments, experiment, gpus.per_node)
    tokens = arguments.tokens or (experiment.train.iterations * question.global_batch_size * experiment.model.seq_len)
    return Asked(arguments.model, experiment, Workload.of(experiment, gpus), gpus, question, tokens, assumed)


def _machine(arguments: argparse.Namespace, settings: Settings, experiment: Experiment) -> Machine:
    """The kind of GPU, with the figures that options replace; or this machine's CPUs."""
    cluster, own_figures = settings.cluster, (arguments.gpu_memory, arguments.peak_tflops)
    here = arguments.config is not None and judges_this_machine(cluster) and not any(own_figures)
    name = arguments.gpu or cluster.gpu or ("" if all(own_figures) else _CPUS if here else _DEFAULT_GPU)
    if name == _CPUS:
        configured = processes_of(experiment, cluster) if arguments.config else 1
        return this_cpu(arguments.gpus or configured, cluster.cpus_per_task)
    return machine(name, cluster.gpus, arguments.gpus_per_node or cluster.gpus_per_node, *own_figures)


def _question(arguments: argparse.Namespace, experiment: Experiment, per_node: int) -> Question:
    """The number of GPUs and the batch."""
    parallel, batch = experiment.parallel, arguments.max_global_batch_size or arguments.global_batch_size
    if arguments.given:
        if arguments.gpus or batch or arguments.micro_batch_size:
            raise InputError(
                "--given takes GPUs and batch from the configuration; leave --gpus and the batch options out, or "
                "replace keys: parallel.data=N train.global_batch_size=N"
            )
        if experiment.world_size != parallel.pipeline * parallel.data * parallel.tensor:
            raise InputError("--given, but parallel is `auto`; leave --given out to see which layouts there are")
    configured = experiment.world_size if arguments.given or arguments.config else 0
    gpus = arguments.gpus or configured or per_node
    if gpus > per_node and gpus % per_node:
        below = gpus // per_node * per_node
        cure = "" if arguments.given else f"--gpus {below} or {below + per_node}, or "
        raise InputError(f"{gpus} GPUs are no whole nodes of {per_node}; give {cure}another --gpus-per-node")
    size = batch or experiment.train.global_batch_size
    return Question(gpus, size, arguments.max_global_batch_size is not None, arguments.micro_batch_size or 0)


if __name__ == "__main__":
    sys.exit(cli.run(main))
