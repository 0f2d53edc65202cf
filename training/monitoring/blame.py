"""Names the documents of a step whose loss is a spike or whose numbers are not finite: MODEL/blame/iter_0000123.json.

    if blame.wants(iteration):                                          # on all ranks
        rows = sample_rows(data, consumed, losses)                      # of the samples that this rank has
        blame.write(iteration, loss, problem, rows)                     # on rank 0, with the rows of all ranks

The file is one object: `iteration`, `loss`, `problem`, `worst` and `samples`. A sample has its number in the global
batch, its `loss` and its `pieces`, the documents in it: `dataset`, `document` (its number), `id`, `url`, `first` and
`tokens` (the range in the document), `loss`. A loss is in nats per target, without dropout, by the weights before the
step; null if it is not finite. Samples that are not finite come first, then those with the highest loss. So do the
pieces of a sample, each weighted by its tokens: first is what raised the loss most. `worst` names the documents of the
first sample, or of all that are not finite. If no sample is finite it names none: then the weights are not either.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from common.console import warn
from common.errors import InputError
from common.files import write_json
from training.model_folder import blame_file

if TYPE_CHECKING:
    from training.dataset.blend import Blend

_FILES = 100  # per start: 25 MB with 512 samples of a few documents, and the time of 33 steps
_IN_A_ROW = 10  # a loss that stays high is one event, and must not use up the files of later ones

Rows = list[dict[str, Any]]


def sample_rows(
    data: "Blend", first: int, losses: Mapping[int, tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]]
) -> Rows:
    """Samples as in the file, in any order; `first` is the number of the global batch's first sample.

    `losses` has the nats of each sample's targets and which of them count, (seq_len,) both.
    """
    rows = []
    for number, (nats, counted) in losses.items():
        corpus, index = data.find(number)
        samples = data.parts[corpus]
        pieces, begin = [], 0
        for span in samples.spans(index):
            own = slice(max(0, begin - 1), begin + span.tokens - 1)  # target i is token i + 1
            begin += span.tokens
            piece: dict[str, Any] = {"dataset": str(samples.corpus.prefix), "document": span.document}
            piece |= {"id": "", "url": "", "first": span.first, "tokens": span.tokens}
            pieces.append(piece | {"loss": _mean(nats[own], counted[own])})
        rows.append({"sample": number - first, "loss": _mean(nats, counted), "pieces": pieces})
    return rows


def _mean(nats: npt.NDArray[np.float32], counted: npt.NDArray[np.bool_]) -> float:
    return float(nats.sum(dtype=np.float64)) / max(1, int(counted.sum()))


class Blame:
    """Writes the files of one start of a training, unless it `may_write` no more."""

    def __init__(self, folder: Path, may_write: Callable[[], bool] = lambda: True) -> None:
        self._folder, self._may_write = folder, may_write
        self._last = self._in_a_row = self._files = 0

    def wants(self, iteration: int) -> bool:
        """Whether to look at this bad step, too: the same on all ranks."""
        self._in_a_row = self._in_a_row + 1 if iteration == self._last + 1 else 1
        self._last = iteration
        wanted = self._in_a_row <= _IN_A_ROW and self._files < _FILES
        self._files += wanted
        return wanted

    def write(self, iteration: int, loss: float, problem: str, rows: Rows) -> None:
        """Write the file of a step, and a line about its worst sample. Never raises: the training goes on without."""
        path = blame_file(self._folder, iteration)
        try:
            _order(rows)
            _name_documents(piece for row in rows for piece in row["pieces"])
            found, worst = _finding(rows)
            if self._may_write():
                path.parent.mkdir(exist_ok=True)
                record = {"iteration": iteration, "loss": loss, "problem": problem, "worst": worst, "samples": rows}
                write_json(path, record)
                if worst:
                    warn(f"iteration {iteration}: {found}: {listed(worst)}; see {path}")
        except Exception as error:
            warn(f"{path}: {error}; the training goes on without it")


def _order(rows: Rows) -> None:
    """Sort samples and their pieces in place, worst first."""
    middle = median([row["loss"] for row in rows if math.isfinite(row["loss"])] or [0.0])

    def added(part: Mapping[str, Any], tokens: int) -> float:
        return (part["loss"] - middle) * tokens if math.isfinite(part["loss"]) else math.inf

    rows.sort(key=lambda row: (-added(row, 1), row["sample"]))
    for row in rows:
        row["pieces"].sort(key=lambda piece: -added(piece, piece["tokens"]))


def _name_documents(pieces: Iterable[dict[str, Any]]) -> None:
    """Fill in ids and URLs, from the datasets that have a PREFIX.docs."""
    tables: dict[str, Any] = {}
    for piece in pieces:
        dataset = piece["dataset"]
        if dataset not in tables:
            tables[dataset] = ()
            with suppress(ImportError, InputError, OSError):
                from corpus.index.documents import DocumentTable  # needs tldextract, which a node may lack

                tables[dataset] = DocumentTable(Path(dataset))
        if piece["document"] < len(tables[dataset]):
            row = tables[dataset][piece["document"]]
            piece |= {"id": row.id, "url": row.url}


def _finding(rows: Rows) -> tuple[str, list[str]]:
    """What to say about ordered rows, and the names of the worst documents; none if no sample is finite."""
    bad = [row for row in rows if not math.isfinite(row["loss"])]
    if len(bad) == len(rows):
        return "", []
    found = f"sample {rows[0]['sample']} has the highest loss, {rows[0]['loss']:.4f}"
    if bad:
        found = f"the loss of {len(bad)} of {len(rows)} samples is not finite"
    pieces = [piece for row in bad or rows[:1] for piece in row["pieces"]]
    names = (piece["url"] or piece["id"] or f"document {piece['document']} of {piece['dataset']}" for piece in pieces)
    return found, list(dict.fromkeys(names))


def listed(worst: list[str]) -> str:
    """The first of the `worst` documents of a file, and how many more there are."""
    if not worst:
        return "the loss of no sample is finite"
    return f"{worst[0]} and {len(worst) - 1} more" if len(worst) > 1 else worst[0]
