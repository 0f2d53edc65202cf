"""Write one self-contained HTML file about a run: what each step kept, how the training went, what the model writes.

    python -m workflow.report --run results/demo --output results/demo/report.html
    python -m workflow.report --run results/demo --compare results/mine --output compare.html
    snakemake report

Reads the stats.json files, training curves, evaluations and samples below DIR; missing ones are left out. With
--config, files of an earlier configuration with more shards or steps are not counted. --compare shows instead in which
keys and figures other runs differ from this one, and all losses in one chart.
"""

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common import cli, page
from common.config import settings_text
from common.errors import InputError
from common.files import read_text, write_text
from common.settings import Settings
from workflow.report import compare
from workflow.report.corpus import corpus_figures, kept_documents
from workflow.report.funnel import FunnelStep, documents_chart, funnel
from workflow.report.models import Model, settings_of, split_samples, trained_models
from workflow.report.timing import Clock, gantt_chart, timeline
from workflow.report.training import comparisons, curve_charts, curve_rows, memory_chart
from workflow.runs import moved, read_card


def render(run: Path, settings: Settings | None = None) -> str:
    """The report as HTML, limited to the steps and shards in `settings`. Raises InputError if `run` is not a run."""
    steps = funnel(run, settings)
    models = trained_models(run)
    if not steps and not models:
        raise InputError(f"{run}: no stats.json or train.csv below it; give the `run` folder of a configuration")
    works = timeline(run, models, settings.shards if settings else None)
    known = settings or settings_of(run / "config.yaml")
    names = ", ".join(model.name for model in models)
    extended = f" It extends {', '.join(map(str, known.base))}." if known and known.base else ""
    run_card = read_card(run) or None
    return page.render(
        "workflow.report",
        "template.html",
        title=run.name or str(run),
        summary=f"{run}: the corpus, step by step{f', and the training of {names}' if names else ''}.{extended}",
        finished=datetime.fromtimestamp(max(work.ended for work in works), UTC) if works else None,
        steps=steps,
        documents_chart=documents_chart(steps),
        corpus=corpus_figures(run, steps),
        kept=kept_documents(moved(known, run)) if known else [],
        models=models,
        charts=curve_charts(models),
        curve_rows=curve_rows,
        memory_chart=memory_chart(models),
        comparisons=comparisons,
        works=works,
        clock=Clock(works),
        gantt_chart=gantt_chart(works) if works else None,
        samples={model.name: split_samples(model.sample, known) for model in models if model.sample},
        config=settings_text(settings) if settings else _configuration(run),
        run_card=run_card,
        versions=_versions(run_card, steps, models),
    )


def _versions(
    run_card: Mapping[str, Any] | None, steps: Sequence[FunnelStep], models: Sequence[Model]
) -> dict[str, str]:
    """The software versions in the run's files."""
    found: dict[str, str] = {}
    for step in steps:
        found.update(step.libraries)
    for model in models:
        found.update((model.merged or {}).get("versions", {}))
    found.update((run_card or {}).get("versions", {}))
    return {name: str(version) for name, version in sorted(found.items())}


def _configuration(run: Path) -> str | None:
    path = run / "config.yaml"  # written when the run started
    return read_text(path) if path.exists() else None


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
