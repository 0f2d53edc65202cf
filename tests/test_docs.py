"""Pages, comments and docstrings name files, modules, options and keys that exist."""

import ast
import io
import re
import shlex
import tokenize
from pathlib import Path

import pytest
import yaml
from snakemake.cli import get_argument_parser

from common.config import merged, read_yaml
from common.settings import ClusterSettings, Settings
from tests.conftest import ROOT

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATH = re.compile(r"\w[\w.+-]*/[\w./+-]*|\w+\.(?:yaml|md|py)")


def test_every_file_that_the_architecture_and_the_gate_name_exists() -> None:
    found = {name for name in re.findall(r"`([^`\s]+)`", ARCHITECTURE) if PATH.fullmatch(name)}
    found |= set(re.findall(r"\btests/[\w/.]+", (ROOT / ".ci/run").read_text(encoding="utf-8")))
    named = [name for name in found if not name.startswith("results/")]
    assert len(named) > 100 and [name for name in named if not (ROOT / name).exists()] == []


def test_the_site_has_no_file_that_python_compiles() -> None:
    config = pytest.importorskip("mkdocs.config").load_config(str(ROOT / "mkdocs.yml"))
    assert config["exclude_docs"].match_file("__pycache__/site_hooks.cpython-311.pyc")
    assert not config["exclude_docs"].match_file("quickstart.md")


def _is_quick(file: str) -> dict[str, bool]:
    """The tests of a file, and whether `make test` runs them."""
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    marks = "".join(
        ast.unparse(node) for node in body if isinstance(node, ast.Assign) if "pytestmark" in ast.dump(node)
    )
    functions = {node.name: set(map(ast.unparse, node.decorator_list)) for node in body if hasattr(node, "args")}
    return {name: "pytest.mark.slow" not in {*own, *re.findall(r"[\w.]+", marks)} for name, own in functions.items()}


def test_every_promise_has_a_quick_test_close_to_the_code_and_another_that_may_be_slow() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Promises\n")[1].split("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and not row.startswith(("| promise", "| **"))]
    assert len(rows) > 80
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert len(tests) == len(set(tests)) == 2, row
        (_, anywhere), (_, close) = found = [(name, _is_quick(file).get(name)) for file, name in tests]
        assert anywhere is not None and close, (row, found)


def test_every_message_that_the_troubleshooting_page_quotes_is_in_the_code() -> None:
    foreign = {"snakemake: command not found", "No space left on device", "Disk quota exceeded", "Permission denied"}
    foreign |= {
        "Nodes required for job are DOWN, …",
        "launch failed requeued held",
        "Nothing to be done",
        "No module named report",
    }
    packages = [path.parent.name for path in ROOT.glob("[a-z]*/__init__.py") if path.parent.name != "tests"]
    files = [ROOT / "Makefile", *(path for package in packages for path in (ROOT / package).rglob("*.py"))]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    messages = re.sub(r'"\n\s*f?"', "", sources)  # a text in several literals
    rows = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8").splitlines()
    cells = [row.split(" | ")[0] for row in rows if row.startswith("| ")]
    quoted = {quote for cell in cells for quote in re.findall("`([^`]+)`", cell) if " " in quote} - foreign
    patterns = {quote: ".*".join(map(re.escape, quote.strip("…").split("…"))) for quote in quoted}
    assert len(quoted) > 15 and {quote for quote in quoted if not re.search(patterns[quote], messages)} == set()


def test_every_link_leads_to_a_file_and_the_readme_links_the_quick_start_first() -> None:
    for page in PAGES:
        links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
        assert [link for link in links if not (page.parent / link).exists()] == [], page.name
    readme = re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert readme[0] == "docs/quickstart.md"


def test_no_page_replaces_the_clone_by_a_copy() -> None:
    """Without -e, pip copies the code to site-packages, and Snakemake runs the copy."""
    assert [page.name for page in PAGES if re.search(r"pip install ['.\"]*\.?\[", page.read_text("utf-8"))] == []


def test_snakemake_knows_the_options_of_documented_commands() -> None:
    """Commands that begin with `python -m` are in test_examples.py."""
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in PAGES]
    found = [re.findall(r"^ *snakemake (.*)", text, re.MULTILINE) for text in texts]
    commands = [shlex.split(re.split(r"\s#\s| [|>&]|;", line)[0]) for lines in found for line in lines]
    assert len(commands) > 10
    for words in commands:
        get_argument_parser().parse_args(words)  # exits if one is unknown


def test_the_configurations_that_the_pages_write_are_valid() -> None:
    changed = {"docs/quickstart.md": "config.yaml", "docs/openwebtext.md": "configs/openwebtext.yaml"}
    alone = ("README.md", "docs/own_text.md", "docs/finetune.md", "docs/from_megatron.md")
    for name in (*changed, *alone):
        page = (ROOT / name).read_text(encoding="utf-8")
        for block in map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)):
            whole = block if name in alone else merged(read_yaml(ROOT / changed[name]), block)
            Settings.model_validate(whole)


def _remarks(path: Path) -> str:
    """The comments and docstrings of a Python file or of a file of rules."""
    text = path.read_text(encoding="utf-8")
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    nodes = ast.walk(ast.parse(text)) if path.suffix == ".py" else ()
    strings = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return "\n".join([*comments, *(node.value for node in strings if isinstance(node.value, str))])


def _is_name(dotted: str) -> bool:
    """Whether it is a module, something that a module names, a settings key, or a file's name."""
    place, (first, *rest) = ROOT, dotted.split(".")
    if rest[-1] in ("json", "pt") or (first == "cluster" and rest[0] in ClusterSettings.model_fields):
        return True
    place /= first
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    module = (place / rest[0]).with_suffix(".py") if rest else place / "__init__.py"
    if module.is_file():
        files, names = [module], rest[1:]
    else:
        files, names = [place / "__init__.py", place / "__main__.py"], rest
    source = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    return all(re.search(rf"\b{name}\b", source) for name in names)


def test_every_path_and_dotted_name_in_a_comment_or_docstring_exists() -> None:
    packages = ["tests", *(path.parent.name for path in ROOT.glob("[a-z]*/__init__.py"))]
    folders = "|".join([*packages, "docs", "configs", "profiles", "slurm"])
    missing, seen = [], 0
    for path in [*ROOT.glob("workflow/rules/*.smk"), *(p for name in packages for p in ROOT.glob(f"{name}/**/*.py"))]:
        text = _remarks(path)
        paths = re.findall(rf"(?<![\w/.-])(?:{folders})(?:/[\w.-]+)+(?![*\w])", text)
        dotted = re.findall(rf"(?<![\w/.-])(?:{'|'.join(packages)})(?:\.[a-z_]\w*)+", text)
        seen += len(paths) + len(dotted)
        gone = [name for name in paths if not (ROOT / name.rstrip(".")).exists()]
        gone += [name for name in dotted if not _is_name(name)]
        missing += [(str(path.relative_to(ROOT)), name) for name in gone]
    assert seen > 300 and missing == []
