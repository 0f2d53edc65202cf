"""Plain-text tables for people: columns aligned with spaces, ready for `print`; sizes as text."""

from collections.abc import Iterable, Sequence

from tabulate import tabulate


def text_table(rows: Iterable[Sequence[object]], align: str = "") -> str:
    """Rows of cells as lines. `align` has an `l` or `r` per column; columns without one are left-aligned."""
    lines = list(rows)
    columns = max(map(len, lines), default=0)
    sides = ["right" if side == "r" else "left" for side in align.ljust(columns, "l")]
    # the widths are computed on text: numbers are formatted by the caller
    text = tabulate(lines, tablefmt="plain", colalign=sides[:columns], disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def readable_bytes(number: float) -> str:
    """`14.75 GiB`, `3.2 MiB`."""
    return f"{number / 2**30:,.2f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"
