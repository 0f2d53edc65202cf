"""The files of a GPU benchmark: one Markdown file per part, rewritten whenever a row arrives, and all rows as JSON.

DIR/step.md, kernels.md, …     a head with the device, tables, goals, and what failed or was left out
DIR/tests.txt                  what the compiler and pytest printed
DIR/rows.jsonl                 {"part": …, "item": …, column: value, …} per line
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson
from tabulate import tabulate

from benchmarks.gpu.goals import goals
from benchmarks.gpu.items import Item, Row
from common.files import write_text


class Report:
    """Collects rows and notes, and keeps the files up to date."""

    def __init__(self, folder: Path, titles: Mapping[str, str], files: Mapping[str, str]) -> None:
        """`titles` and `files`: the title of each part, and the name of its file without `.md`."""
        self.folder, self.titles, self.files = folder, titles, files
        self.head = "no device yet"
        self.rows: dict[str, list[Row]] = {part: [] for part in titles}
        self.notes: dict[str, list[str]] = {part: [] for part in titles}
        self.failed: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rows.jsonl").write_bytes(b"")

    def add(self, item: Item, row: Row) -> None:
        """A row of a table."""
        self.rows[item.part].append(row)
        with (self.folder / "rows.jsonl").open("ab") as file:
            file.write(orjson.dumps({"part": item.part, "item": item.name, **row}) + b"\n")
        self._write(item.part)
        print(f"{item.part}: " + "  ".join(f"{name} {cell(value)}" for name, value in row.items()), flush=True)

    def note(self, item: Item, text: str, failed: bool = False) -> None:
        """What happened to an item that has no row: its first line is printed, too."""
        first, _, rest = text.partition("\n")
        line = f"{'FAILED: ' * failed}{item.name}: {first}"
        self.notes[item.part].append(f"- {line}" + (f"\n\n```\n{rest.strip()}\n```\n" if rest else ""))
        if failed:
            self.failed.append(f"{item.part}: {item.name}: {first}")
        self._write(item.part)
        print(f"{item.part}: {line}", flush=True)

    def goals(self) -> list[str]:
        """The goals of all parts, with what was reached."""
        return goals(self.rows)

    def _write(self, part: str) -> None:
        """Write the file of a part again."""
        name = self.files[part]
        sections = [self._section(each) for each, file in self.files.items() if file == name]
        write_text(self.folder / f"{name}.md", "\n\n".join([self.head, *filter(None, sections)]) + "\n")

    def _section(self, part: str) -> str:
        """A part's tables, goals and notes; "" if there are none yet."""
        rows, notes = self.rows[part], self.notes[part]
        if not rows and not notes:
            return ""
        tables = [markdown(list(same)) for _, same in groupby(rows, key=lambda row: list(row))]
        reached = [f"- {line}" for line in goals({part: rows})]
        sections = [f"## {self.titles[part]}", *tables]
        sections += ["Goals:\n\n" + "\n".join(reached)] * bool(reached)
        sections += ["Notes:\n\n" + "\n".join(notes)] * bool(notes)
        return "\n\n".join(sections)


def markdown(rows: Sequence[Row]) -> str:
    """Rows with equal columns as a Markdown table."""
    cells = [{name: cell(value) for name, value in row.items()} for row in rows]
    return str(tabulate(cells, headers="keys", tablefmt="github", disable_numparse=True))


def cell(value: Any) -> str:
    """A value as a person reads it: 204,123 tokens, 12.3 %, 0.0456 ms, - for what is not known."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
