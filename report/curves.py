"""Training curves as SVG, to be embedded in an HTML page."""

from pathlib import Path

from markupsafe import Markup

from common.files import read_rows
from common.page import as_svg, figure_style


def _column(path: Path, name: str) -> tuple[list[int], list[float]]:
    """The iterations and one column of a CSV file; empty if the file does not exist."""
    rows = read_rows(path)
    return [int(row["iteration"]) for row in rows], [float(row[name]) for row in rows]


def loss_curve(model_folder: Path) -> Markup:
    """Training and validation loss over iterations, from train.csv and valid.csv of a model folder."""
    with figure_style(model_folder.name):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
        axes.plot(*_column(model_folder / "train.csv", "lm_loss"), label="training", color="#1f5fa8", linewidth=1.4)
        iterations, losses = _column(model_folder / "valid.csv", "loss")
        if iterations:
            axes.plot(iterations, losses, "o-", label="validation", color="#c2571a", linewidth=1.4, markersize=4)
        axes.set_xlabel("iteration")
        axes.set_ylabel("loss (nats per token)")
        axes.legend()
        axes.grid(axis="y")
        return as_svg(figure, "Training and validation loss over iterations")
