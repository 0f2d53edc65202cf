"""What the parts of the GPU benchmark are made of: items that run one after the other, and the rows that they yield."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
"""A line of a table: column -> a number, a text or None. A file has a table for each set of columns."""


class LeftOutError(Exception):
    """An item that does not apply here; its text says why."""


@dataclass(frozen=True)
class Item:
    """One measurement; a failure or a time-out of an item leaves all others untouched."""

    part: str
    name: str
    seconds: float = 10.0
    """How long it should take; it begins only if that much time is left, and is ended after three times as long."""
    alone: bool = False
    """Whether it leaves settings behind that only the end of its process undoes."""
    on_cpu: bool = True
    """Whether it makes sense without a GPU, as a rehearsal."""


@dataclass(frozen=True)
class Context:
    """What items know of the machine and of earlier items."""

    folder: Path
    """A temporary folder."""
    toy: bool
    gpu: bool = False
    copy: float | None = None
    """Measured bandwidth of a copy on the device, in bytes per second, read and written."""
    product: float | None = None
    """Measured FLOP/s of large bfloat16 products."""
    rows: Mapping[str, list[Row]] = field(default_factory=dict)
    """The rows of each part so far."""
