"""docs/architecture.md names files, tests and folders that exist, and leaves no folder out; links lead somewhere.

`make docs` checks the links inside pages.
"""

import html
import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGES = ("common", "corpus", "training", "convert", "cluster", "report", "demo", "benchmarks")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NOT_OURS = ("No space left on device", "snakemake: command not found")
"""Messages of the system in docs/troubleshooting.md."""
PATH = re.compile(r"\w[\w.+-]*/[\w./+-]*|\w+\.(?:yaml|md|py)")


def _named() -> list[str]:
    """Every path of the repository in code marks: `corpus/clean.py`, `workflow/rules/`."""
    found = {name for name in re.findall(r"`([^`\s]+)`", ARCHITECTURE) if PATH.fullmatch(name)}
    return sorted(name for name in found if not name.startswith("results/"))


def _section(title: str) -> str:
    return ARCHITECTURE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_every_file_that_the_architecture_names_exists() -> None:
    assert len(_named()) > 100
    missing = [name for name in _named() if not (ROOT / name).exists()]
    assert not missing, "\n".join(missing)


def test_every_invariant_has_a_test_that_exists() -> None:
    guards = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", _section("Invariants"))
    assert len(guards) > 20
    missing = [
        f"{name}::{test}"
        for name, test in guards
        if not (ROOT / name).is_file() or f"def {test}(" not in (ROOT / name).read_text(encoding="utf-8")
    ]
    assert not missing, "\n".join(missing)


def test_every_folder_of_the_packages_is_in_the_tree() -> None:
    tree = _section("The tree")
    folders = {path.parent.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if f"`{folder}/`" not in tree] == []


def test_at_least_twenty_changes_have_their_file() -> None:
    rows = [row for row in _section("To change X, open Y").splitlines() if row.startswith("| ")]
    assert len(rows) > 20
    for row in rows[1:]:
        change, where, _ = (cell.strip() for cell in row.strip("|").split("|"))
        assert "`" in where or where.startswith("the `raise`"), change


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_every_link_leads_to_a_file(page: str) -> None:
    folder = (ROOT / page).parent
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not (folder / link).exists()] == []


def test_the_readme_links_the_quick_start_first() -> None:
    links = re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert Path(links[0]) == Path("docs/quickstart.md")


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").split("## How fast it is\n")[1].split("\n## ")[0]
    measured = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    rows = [row.strip("|").split("|") for row in readme.splitlines() if row.startswith("| ")][1:]
    figures = [figure for row in rows for cell in row[1:3] for figure in re.findall(r"\d[\d.,]*\d", cell)]
    assert len(rows) > 8 and [figure for figure in figures if figure not in measured] == []


def test_the_messages_that_the_troubleshooting_page_quotes_are_those_of_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    cells = [row.split(" | ")[0] for row in page.splitlines() if row.startswith("| ")]
    quoted = [quote for cell in cells for quote in re.findall(r"`([^`]* [^`]*)`", cell) if quote not in NOT_OURS]
    sources = [ROOT / "Makefile", *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]
    code = re.sub(r'"\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in sources))
    parts = [part.strip(" ,;:") for quote in quoted for part in quote.split("…")]
    assert len(quoted) > 12 and [part for part in parts if part not in code] == []


def _drawing() -> tuple[set[str], list[str]]:
    """The edges of docs/dag.dot, and its labels."""
    text = re.sub(r"//.*", "", (ROOT / "docs/dag.dot").read_text(encoding="utf-8"))
    chains = re.findall(r"\w+(?: -> \w+)+", text)
    edges = {f"{a}->{b}" for chain in chains for a, b in pairwise(chain.split(" -> "))}
    return edges, re.findall(r'(?<!font)label="([^"]*)"', text)


def test_the_picture_of_the_dag_is_that_of_its_source() -> None:
    svg = html.unescape((ROOT / "docs/dag.svg").read_text(encoding="utf-8"))
    edges, labels = _drawing()
    assert {title for title in re.findall(r"<title>(.*?)</title>", svg) if "->" in title} == edges
    texts = set(re.findall(r"<text[^>]*>(.*?)</text>", svg))
    assert {line for label in labels for line in label.split("\\n")} <= texts


def test_the_steps_in_the_picture_are_rules_of_the_workflow() -> None:
    rules = {
        name
        for path in (ROOT / "workflow/rules").glob("*.smk")
        for name in re.findall(r"^ *rule (\w+):", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    steps = {step for edge in _drawing()[0] for step in edge.split("->")} - {"urls", "texts", "index", "folder"}
    assert steps - rules == set()
