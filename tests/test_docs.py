"""The pages name files, folders, tests and messages that exist; their links lead somewhere."""

import ast
import re

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


def _quick_tests(file: str) -> set[str]:
    """The tests of a file that `make test` runs."""
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    marks = [
        ast.unparse(node.value) for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)
    ]
    functions = [
        node for node in body if isinstance(node, ast.FunctionDef) and "pytest.mark.slow" not in "".join(marks)
    ]
    return {f.name for f in functions if "pytest.mark.slow" not in map(ast.unparse, f.decorator_list)}


def test_every_promise_has_two_tests_that_exist_and_are_not_slow() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Promises\n")[1].split("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and not row.startswith(("| promise", "| **"))]
    assert len(rows) > 80
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert len(tests) == len(set(tests)) == 2, row
        assert [name for file, name in tests if name not in _quick_tests(file)] == [], row


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
