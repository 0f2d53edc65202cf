"""docs/architecture.md names files, tests and folders that exist, and leaves no folder out; links lead somewhere.

`make docs` checks the links inside pages.
"""

import html
import re
from itertools import pairwise

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
    assert [name for name in _named() if not (ROOT / name).exists()] == []


def test_every_invariant_has_a_test_that_exists() -> None:
    guards = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", _section("Invariants"))
    assert len(guards) > 20
    files = {name: (ROOT / name).read_text(encoding="utf-8") for name, _ in guards}
    assert [f"{name}::{test}" for name, test in guards if f"def {test}(" not in files[name]] == []


def test_every_folder_of_the_packages_is_in_the_tree() -> None:
    tree = _section("The tree")
    folders = {path.parent.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if f"`{folder}/`" not in tree] == []


def test_every_link_leads_to_a_file_and_the_readme_links_the_quick_start_first() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
        assert [link for link in links if not (page.parent / link).exists()] == [], page.name
    readme = re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert readme[0] == "docs/quickstart.md"


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


def test_the_picture_of_the_dag_is_that_of_its_source_and_its_steps_are_rules() -> None:
    source = re.sub(r"//.*", "", (ROOT / "docs/dag.dot").read_text(encoding="utf-8"))
    edges = [pair for chain in re.findall(r"\w+(?: -> \w+)+", source) for pair in pairwise(chain.split(" -> "))]
    labels = re.findall(r'(?<!font)label="([^"]*)"', source)
    svg = html.unescape((ROOT / "docs/dag.svg").read_text(encoding="utf-8"))
    assert {title for title in re.findall(r"<title>(.*?)</title>", svg) if "->" in title} == {
        f"{a}->{b}" for a, b in edges
    }
    assert {line for label in labels for line in label.split("\\n")} <= set(re.findall(r"<text[^>]*>(.*?)</text>", svg))
    workflow = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "workflow/rules").glob("*.smk"))
    rules = set(re.findall(r"^ *rule (\w+):", workflow, re.MULTILINE))
    assert {step for edge in edges for step in edge} - {"urls", "texts", "index", "folder"} <= rules
