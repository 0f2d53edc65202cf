"""Write one self-contained HTML file about a run: where documents went, how the loss fell, what the model says.

    python -m report --run results/demo --output results/demo/report.html
    snakemake report

Reads the stats.json files, training curves, evaluations and samples below DIR; what is not there yet is left out.
With --config, files that an earlier configuration with more shards or steps left are not counted.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2

from common import cli
from common.config import load_settings
from common.errors import InputError
from common.files import read_json, read_text, write_text
from report.corpus import corpus
from report.curves import loss_curve
from report.funnel import STEPS, funnel


def models(run: Path) -> list[dict[str, object]]:
    """What is known of each trained model: curve (SVG), evaluation, sample."""
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


def render(run: Path, config: Path | None = None) -> str:
    """The report as HTML; `config` is the run's configuration. InputError when the folder holds no run."""
    settings = load_settings(config) if config else None
    config = config or run / "config.yaml"
    steps = funnel(run, settings)
    trained = models(run)
    if not steps and not trained:
        raise InputError(
            f"{run}: no stats.json and no training curve below it; give the `run` folder of a configuration"
        )
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("report", "."), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template("template.html").render(
        run=str(run),
        steps=steps,
        corpus=corpus(run, {folder: name for folder, (name, _) in STEPS.items()}, settings),
        models=trained,
        config=config.read_text(encoding="utf-8") if config.exists() else None,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = cli.parser("report", __doc__)
    parser.add_argument(
        "--run", type=cli.input_path, required=True, metavar="DIR", help="the `run` folder of a configuration"
    )
    parser.add_argument("--config", type=cli.input_path, metavar="FILE", help="only the shards and steps of this one")
    parser.add_argument("--output", type=cli.output_file, required=True, metavar="FILE.html")
    arguments = parser.parse_args(argv)
    if not arguments.run.is_dir():
        raise InputError(f"{arguments.run}: no such folder")
    write_text(arguments.output, render(arguments.run, arguments.config))
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
