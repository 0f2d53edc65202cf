"""Self-contained HTML pages: one look in light and dark, figures as SVG inside, nothing fetched from elsewhere.

{% extends "base.html" %}{% block content %}…{% endblock %}     # report/template.html
render("report", "template.html", title="results/demo", …)
"""

import html
import io
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jinja2
from markupsafe import Markup

_INK = "#222223"  # drawn in it: what takes the page's text colour, light or dark


def render(package: str, template: str, **values: Any) -> str:
    """A template of a package that extends `base.html`; `title` is its heading."""
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(package, "."), jinja2.PackageLoader("common", ".")])
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.get_template(template).render(values)


def figure_style(name: str) -> AbstractContextManager[None]:
    """Matplotlib's settings for a figure of a page: SVG whose text is text, the same figure as the same file.

    `name` keeps the ids of the figures of a page apart.
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
    }
    context: AbstractContextManager[None] = matplotlib.rc_context(settings)
    return context


def as_svg(figure: Any, label: str, titles: Mapping[str, str] | None = None) -> Markup:
    """A figure as an `<svg>` element, and close it.

    `label` is read aloud in place of the figure. `titles` are shown over the elements with these ids (`set_gid`).
    """
    from matplotlib import pyplot

    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    pyplot.close(figure)
    text = out.getvalue()[out.getvalue().index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)

    def group(match: re.Match[str]) -> str:
        title = (titles or {}).get(match[1])
        return f"<g{match[2]}>" + (f"<title>{html.escape(title)}</title>" if title else "")

    text = re.sub(r'<g id="([^"]*)"([^>]*)>', group, text)  # nothing refers to groups, and all figures name them alike
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1))
