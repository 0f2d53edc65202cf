"""Self-contained HTML pages: light and dark themes, figures as inline SVG, no external resources.

{% extends "base.html" %}{% block content %}…{% endblock %}     # workflow/report/template.html
render("workflow.report", "template.html", title="results/demo", …)
"""

import csv
import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

# readable on white and black; in this order distinct for the colour-blind
COLORS = ("#1f77c8", "#d0682a", "#3d9a6a", "#b04a86", "#8c8c8c", "#b8901f", "#6f6fd0")
WIDTH = 4.8  # inches of a figure; still readable on a phone
_INK = "#222223"  # replaced by the page's text colour, light or dark
_ROW, _CELL = re.compile("<tr>(.*?)</tr>", re.DOTALL), re.compile("<t[hd]([^>]*)>(.*?)</t[hd]>", re.DOTALL)
_VALUE = re.compile(r'data-value="([^"]*)"')  # of a cell that shows a rounded number
_PLACES = re.compile(r' (?:d|x|y|width|height|transform)="[^"]*"')
_DIGITS = re.compile(r"(\d\.\d\d)\d+")  # 0.01 points are enough


def render(package: str, template: str, **values: Any) -> str:
    """Render a template of a package. HTML templates extend `base.html`; their values are escaped.

    Filters: `number` (1,234), `size` (1.2 MB), `duration` (2 min 5 s), `csv_link` of a table.
    """
    return _environment(package).get_template(template).render(values)


@cache
def _environment(package: str) -> jinja2.Environment:
    """The templates of a package and their filters; compiled once."""
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(package, "."), jinja2.PackageLoader("common", ".")])
    escaped = jinja2.select_autoescape(["html"])
    environment = jinja2.Environment(
        loader=loader, autoescape=escaped, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(number=number, size=size, duration=duration, csv_link=csv_link)
    environment.globals["COLORS"] = COLORS
    return environment


def csv_link(table: str) -> str:
    """A table as a `data:` URL of CSV: `1,234` becomes 1234; `data-value` has precedence."""
    out = io.StringIO()
    for row in _ROW.findall(table):
        csv.writer(out, lineterminator="\n").writerow(_csv_cell(*cell) for cell in _CELL.findall(row))
    return "data:text/csv;charset=utf-8," + quote(out.getvalue())


def _csv_cell(attributes: str, content: str) -> str:
    text = Markup(content).striptags()
    if value := _VALUE.search(attributes):
        return value[1]
    if re.fullmatch(r"[+-]?[\d,]+(\.\d+)?(e[+-]\d+)?%?", text):
        return text.replace(",", "").removesuffix("%")
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text  # a spreadsheet takes these for formulas


def number(value: float) -> str:
    """`1,234`; four digits for fractions below 1,000."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def size(value: float) -> str:
    """`1.2 MB`: bytes, in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:,.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """`0.25 s`, `12.3 s`, `2 min 5 s`, `3 h 7 min`, `4 d 2 h`."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    for large, small, amount, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60)):
        if whole >= amount:
            return f"{whole // amount} {large} {whole % amount // part} {small}"
    return f"{whole // 60} min {whole % 60} s"


def figure_style(name: str) -> AbstractContextManager[None]:
    """Matplotlib's settings for figures of a page: SVG with text as text, reproducible bytes.

    A `name` per figure makes the ids in a page differ.
    """
    import matplotlib

    matplotlib.use("svg")
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings = {
        **dict.fromkeys(inked, _INK),
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "grid.alpha": 0.25,
        "axes.axisbelow": True,
    }
    context: AbstractContextManager[None] = matplotlib.rc_context(settings)
    return context


def as_svg(figure: Any, label: str, titles: Mapping[str, str | Sequence[str]] | None = None) -> Markup:
    """Close a figure and return it as an `<svg>` element.

    `label` is the text for screen readers. `titles` are tooltips by id (`set_gid`); a list has one
    per marker of a line.
    """
    from matplotlib import pyplot

    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    pyplot.close(figure)
    text = out.getvalue()[out.getvalue().index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = _PLACES.sub(lambda match: _DIGITS.sub(r"\1", match[0]), re.sub(r">\s*\n\s*<", "><", text))

    left: Iterator[str] = iter(())  # titles of the markers that follow

    def titled(match: re.Match[str]) -> str:
        """A group without its id, because all figures use the same ids; or a marker."""
        nonlocal left
        gid, attributes, marker = match.groups()
        if marker is None:
            given = (titles or {}).get(gid, ())
            left = iter(() if isinstance(given, str) else given)
            return f"<g{attributes}>" + (f"<title>{html.escape(given)}</title>" if isinstance(given, str) else "")
        title = next(left, None)
        return match[0] if title is None else f"<use{marker}><title>{html.escape(title)}</title></use>"

    text = re.sub(r'<g id="([^"]*)"([^>]*)>|<use([^>]*)/>', titled, text)
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1))
