"""Names the documents of a step whose loss is a spike or not finite: MODEL/blame/iter_0000123.json.

    rows = sample_rows(data, consumed, losses)     # of this process's samples
    write(folder, iteration, loss, problem, rows)  # on rank 0, with the rows of all ranks

The file has `iteration`, `loss`, `problem`, `worst` and `samples`. A sample has its number in the
global batch, its `loss` and its `pieces`: `dataset`, `document` (its number), `id`, `url`, `first`
and `tokens` (the range), `loss`. Each loss is in nats per target, without dropout, by the weights
before the step; null if it is not finite. Samples that are not finite come first, then the
highest losses; in a sample, the pieces that add most to its loss above the batch's median. `worst`
names the documents of the first sample, or of all that are not finite; none if no sample is finite.
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy.typing as npt

from common.console import warn
from common.files import write_json
from training.dataset.blend import Blend

Rows = list[dict[str, Any]]


def sample_rows(data: Blend, first: int, losses: Iterable[tuple[int, npt.NDArray[Any], npt.NDArray[Any]]]) -> Rows:
    """The samples of `outputs.target_losses` as in the file; `first` is the batch's first one."""
    rows = []
    for number, nats, counted in losses:
        corpus, index = data.find(number)
        pieces, begin = [], 0
        for span in data.parts[corpus].spans(index):
            own = slice(max(0, begin - 1), begin + span.tokens - 1)  # target i is token i + 1
            begin += span.tokens
            piece = {"dataset": str(data.parts[corpus].corpus.prefix), "document": span.document, "id": "", "url": ""}
            pieces.append({**piece, "first": span.first, "tokens": span.tokens, "loss": _mean(nats[own], counted[own])})
        rows.append({"sample": number - first, "loss": _mean(nats, counted), "pieces": pieces})
    return rows


def _mean(nats: npt.NDArray[Any], counted: npt.NDArray[Any]) -> float:
    mean = float(nats.sum(dtype=float)) / max(1, int(counted.sum()))
    return mean if math.isfinite(mean) else math.inf


def write(folder: Path, iteration: int, loss: float, problem: str, rows: Rows) -> None:
    """Write the file of a step and warn of its worst documents; no error ends the training."""
    path = folder / "blame" / f"iter_{iteration:07d}.json"
    try:
        bad = [row for row in rows if row["loss"] == math.inf]
        middle = median([row["loss"] for row in rows if row["loss"] < math.inf] or [0.0])
        rows.sort(key=lambda row: (-row["loss"], row["sample"]))
        tables: dict[str, Any] = {}
        for row in rows:
            row["pieces"].sort(key=lambda piece: (middle - piece["loss"]) * piece["tokens"])
            for piece in row["pieces"]:
                _look_up(piece, tables)
        suspects = [piece for row in bad or rows[:1] for piece in row["pieces"] if len(bad) < len(rows)]
        names = (one["url"] or one["id"] or "document {document} of {dataset}".format(**one) for one in suspects)
        worst = list(dict.fromkeys(names))
        write_json(path, {"iteration": iteration, "loss": loss, "problem": problem, "worst": worst, "samples": rows})
        if worst:
            warn(f"iteration {iteration}: the worst sample has {', '.join(worst[:3])}; see {path}")
    except Exception as error:
        warn(f"{path}: {error}")


def _look_up(piece: dict[str, Any], tables: dict[str, Any]) -> None:
    """Fill in a piece's id and URL, if its dataset has a PREFIX.docs."""
    dataset, number = piece["dataset"], piece["document"]
    if dataset not in tables:
        tables[dataset] = ()
        with suppress(Exception):
            from corpus.index.documents import DocumentTable  # needs tldextract, which a node may lack

            tables[dataset] = DocumentTable(Path(dataset))
    if number < len(tables[dataset]):
        piece |= {"id": tables[dataset][number].id, "url": tables[dataset][number].url}
