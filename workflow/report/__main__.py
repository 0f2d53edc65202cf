"""Write an HTML report of a run: what each step kept, how training went, what the model writes.

    python -m workflow.report --run results/demo --output results/demo/report.html
    python -m workflow.report --run results/demo --compare results/mine --output compare.html
    snakemake report

The file is self-contained. It shows the statistics, training curves, evaluations and samples below
DIR; missing ones are left out. With --config, files of an earlier configuration with more shards or
steps are not counted. --compare shows instead in which keys and figures other runs differ from this
one, and all losses in one chart.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from common import cli, page
from common.config import settings_text
from common.errors import InputError
from common.files import read_text, write_text
from common.settings import Settings
from workflow.report import compare
from workflow.report.corpus import corpus_figures, kept_documents
from workflow.report.funnel import FunnelStep, documents_chart, funnel
from workflow.report.models import Model, settings_of, split_samples, trained_models
from workflow.report.timing import Clock, Work, gantt_chart, timeline
from workflow.report.training import comparisons, curve_charts, curve_rows, memory_chart
from workflow.runs import moved, read_card

HEADINGS = {
    "funnel": ("Funnel", "The funnel: what each step kept"),
    "corpus": ("Corpus", "The corpus"),
    "curves": ("Curves", "Training curves"),
    "layout": ("Layout and memory", "Layout and memory, planned and used"),
    "time": ("Time", "Where the time went"),
    "results": ("Results", "Results"),
    "checkpoint": ("Checkpoint", "The merged checkpoint"),
    "samples": ("Samples", "Generated text"),
    "configuration": ("Configuration", "Configuration and versions"),
}
"""The sections in their order, each with a template of its name: link and heading."""


def render(run: Path, settings: Settings | None = None) -> str:
    """The report as HTML, limited to the steps and shards in `settings`.

    Raises InputError if `run` is not a run.
    """
    steps, models = funnel(run, settings), trained_models(run)
    if not steps and not models:
        raise InputError(f"{run}: no stats.json or train.csv below it; give the `run` folder of a configuration")
    works = timeline(run, models, settings.shards if settings else None)
    known = settings or settings_of(run / "config.yaml")
    samples = {model.name: split_samples(model.sample, known) for model in models if model.sample}
    card = read_card(run)

    html: dict[str, Markup] = {}  # of each section that has figures
    if steps:
        html["funnel"] = _html("funnel", steps=steps, documents_chart=documents_chart(steps))
        kept = kept_documents(moved(known, run)) if known else []
        html["corpus"] = _html("corpus", steps=steps, corpus=corpus_figures(run, steps), kept=kept)
    if models:
        tables = {model.name: curve_rows(model) for model in models if len(model.train)}
        html["curves"] = _html("curves", charts=curve_charts(models), tables=tables)
        plans = [(model, comparisons(model)) for model in models]
        html["layout"] = _html("layout", memory_chart=memory_chart(models), plans=plans)
        html["results"] = _html("results", models=models)
    if works:
        html["time"] = _html("time", works=works, clock=Clock(works), gantt_chart=gantt_chart(works))
    if merged := [model for model in models if model.merged]:
        html["checkpoint"] = _html("checkpoint", models=merged)
    if samples:
        html["samples"] = _html("samples", samples=samples)

    config, versions = _configuration(run, settings), _versions(card, steps, models)
    html["configuration"] = _html("configuration", config=config, run_card=card, versions=versions)

    facts = _facts(card, steps, models, works)
    trained = f", and the training of {', '.join(model.name for model in models)}" if models else ""
    base = f" It extends {', '.join(map(str, known.base))}." if known and known.base else ""
    untrained = known.models if known and not models else {}
    idle = f" No model was trained; configured: {', '.join(untrained)}." if untrained else ""
    summary = f"{run}: the corpus, step by step{trained}.{base}{idle}"
    return page.render(
        "workflow.report",
        "template.html",
        title=run.name or str(run),
        overview=_html("overview", summary=summary, facts=facts, models=models, samples=samples),
        sections=[(name, *heading, html[name]) for name, heading in HEADINGS.items() if name in html],
    )


def _html(name: str, **values: Any) -> Markup:
    return Markup(page.render("workflow.report", f"{name}.html", **values))


def _facts(
    card: Mapping[str, Any], steps: Sequence[FunnelStep], models: Sequence[Model], works: Sequence[Work]
) -> Iterator[tuple[str, str]]:
    """The most important figures of a run, by name."""
    if works:
        ended = max(work.ended for work in works)
        yield "finished (UTC)", f"{datetime.fromtimestamp(ended, UTC):%Y-%m-%d %H:%M}"
        yield "time at work", page.duration(Clock(works).at(ended))
    if commit := card.get("commit"):
        yield "commit", commit[:12] + "-dirty" * commit.endswith("-dirty")
    for hardware in dict.fromkeys(model.hardware for model in models if model.hardware):
        yield "trained on", hardware
    if steps:
        yield f"{steps[0].unit} in", page.number(steps[0].documents_in)
        yield "documents kept", page.number(steps[-1].documents_out)
        if steps[-1].tokens is not None:
            yield "tokens in the dataset", page.number(steps[-1].tokens)
    if len(models) == 1:  # the results have a table of several
        (model,) = models
        counts = {"parameters": model.parameters, "tokens seen": model.tokens}
        yield from ((name, page.number(count)) for name, count in counts.items() if count)
        if model.epochs:
            yield "epochs", f"{model.epochs:.2f}"
        losses = {"training loss (nats)": model.train_loss, "validation loss (nats)": model.valid_loss}
        losses["bits per byte"] = (model.evaluation or {}).get("bits_per_byte")
        yield from ((name, f"{loss:.4f}") for name, loss in losses.items() if loss is not None)


def _configuration(run: Path, settings: Settings | None) -> str | None:
    path = run / "config.yaml"  # written when the run started
    if settings:
        return settings_text(settings)
    return read_text(path) if path.exists() else None


def _versions(card: Mapping[str, Any], steps: Sequence[FunnelStep], models: Sequence[Model]) -> dict[str, str]:
    """The software versions in the run's files."""
    versions = dict[str, Any]()
    for step in steps:
        versions |= step.libraries
    for model in models:
        versions |= (model.merged or {}).get("versions", {})
    versions |= card.get("versions", {})
    return {name: str(version) for name, version in sorted(versions.items())}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("workflow.report", __doc__)
    parser.add_argument("--run", type=cli.input_path, required=True, metavar="DIR", help="folder of the run")
    parser.add_argument(
        "--compare", type=cli.input_path, nargs="+", default=[], metavar="DIR", help="other runs: show what differs"
    )
    cli.add_settings(parser)
    parser.add_argument("--output", type=cli.output_file, required=True, metavar="FILE.html")
    arguments = parser.parse_args(argv)
    if arguments.overrides and not arguments.config:
        parser.error(f"{arguments.overrides[0]} changes a key of a configuration; name it with --config FILE")
    if arguments.compare and arguments.config:
        parser.error("--compare reads the configuration in each run; leave out --config")
    runs = [arguments.run, *arguments.compare]
    for run in runs:
        if not run.is_dir():
            raise InputError(f"{run}: no such folder")
    settings = cli.read_settings(arguments) if arguments.config else None
    write_text(arguments.output, compare.render(runs) if arguments.compare else render(arguments.run, settings))
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
