"""Write one self-contained HTML file about a run: the documents that each step kept, the loss, a generated sample.

    python -m report --run results/demo --output results/demo/report.html
    snakemake report

Reads the stats.json files, training curves, evaluations and samples below DIR; missing ones are left out. With
--config, files of an earlier configuration with more shards or steps are not counted.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from common import cli, page
from common.config import settings_text
from common.errors import InputError
from common.files import read_json, read_text, write_text
from common.settings import Settings
from report.corpus import corpus_figures
from report.curves import loss_curve
from report.funnel import STEPS, configured_steps, funnel


def trained_models(run: Path) -> list[dict[str, object]]:
    """The name, curve (SVG), evaluation and sample of each trained model."""
    found = []
    for folder in sorted(path.parent for path in run.glob("models/*/train.csv")):
        evaluation, sample = run / "evaluation" / f"{folder.name}.json", run / "samples" / f"{folder.name}.txt"
        found.append(
            {
                "name": folder.name,
                "curve": loss_curve(folder),
                "evaluation": read_json(evaluation) if evaluation.exists() else None,
                "sample": read_text(sample) if sample.exists() else None,
            }
        )
    return found


def render(run: Path, settings: Settings | None = None) -> str:
    """The report as HTML, limited to the steps and shards in `settings`. Raises InputError if `run` is not a run."""
    steps = configured_steps(settings) if settings else STEPS
    shards = settings.shards if settings else None
    rows = funnel(run, steps, shards)
    models = trained_models(run)
    if not rows and not models:
        raise InputError(
            f"{run}: no stats.json and no training curve below it; give the `run` folder of a configuration"
        )
    return page.render(
        "report",
        "template.html",
        title=str(run),
        steps=rows,
        corpus=corpus_figures(run, steps, shards),
        models=models,
        config=_configuration(run, settings),
    )


def _configuration(run: Path, settings: Settings | None) -> str | None:
    if settings is not None:
        return settings_text(settings)
    path = run / "config.yaml"  # written when the run started
    return read_text(path) if path.exists() else None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("report", __doc__)
    parser.add_argument(
        "--run", type=cli.input_path, required=True, metavar="DIR", help="the `run` folder of a configuration"
    )
    cli.add_settings(parser)
    parser.add_argument("--output", type=cli.output_file, required=True, metavar="FILE.html")
    arguments = parser.parse_args(argv)
    if arguments.overrides and not arguments.config:
        parser.error(f"{arguments.overrides[0]} changes a key of a configuration; name it with --config FILE")
    if not arguments.run.is_dir():
        raise InputError(f"{arguments.run}: no such folder")
    settings = cli.read_settings(arguments) if arguments.config else None
    write_text(arguments.output, render(arguments.run, settings))
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
