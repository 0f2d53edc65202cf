"""Read the CSV files that a training writes, of any length, into columns of numbers."""

import math
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import InputError
from common.files import read_text

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """The columns of a CSV file that a training writes."""

    columns: dict[str, Floats]

    def values(self, name: str) -> Floats:
        """A column; empty if the file has none of this name. An empty cell is NaN."""
        return self.columns.get(name, np.empty(0))

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)


def read_curve(path: Path) -> Curve:
    """The numbers of a CSV file, by column; none if it does not exist. An incomplete last row is ignored.

    Raises InputError for a row that is not numbers, or has another number of cells than the header.
    """
    if not path.is_file():
        return Curve({})
    header, *lines = read_text(path).rpartition("\n")[0].splitlines() or [""]
    names = header.split(",")
    columns = [array("d") for _ in names]  # a list of cells would be a hundred bytes for each number
    for place, line in enumerate(lines, 2):
        cells = line.split(",")
        if len(cells) != len(names):
            raise InputError(f"{path}:{place}: not {len(names)} cells; delete the line")
        try:
            for column, cell in zip(columns, cells, strict=True):
                column.append(float(cell) if cell else math.nan)
        except ValueError as error:
            raise InputError(f"{path}:{place}: {error}; delete the line") from None
    return Curve({name: np.array(column) for name, column in zip(names, columns, strict=True)} if lines else {})
