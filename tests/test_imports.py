"""Imports go one way between packages, and in no circle inside them; no command starts with
torch.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from common.commands import COMMANDS
from tests.conftest import ROOT

# what each package may import besides itself and `common`
ALLOWED = {
    "common": set[str](),
    "corpus": set[str](),
    "training": {"corpus.index"},
    "convert": {"training"},
    "cluster": {"training"},
    "workflow": {"corpus", "training", "convert", "cluster"},
    # Snakemake finds its plugins by the names of these packages
    "snakemake_executor_plugin_slurm_batch": {"cluster"},
    "snakemake_scheduler_plugin_in_order": set[str](),
}
_IMPORT = re.compile(r"^\s*(?:from ([\w.]+) )?import ([\w, ]+)$", re.MULTILINE)


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    _module(path): path
    for package in ALLOWED
    for path in sorted((ROOT / package).rglob("*"))
    if path.suffix in (".py", ".smk")
}


@cache
def _imports(module: str) -> list[str]:
    """The modules of ours that a module imports, at its top, inside functions or for types
    alone.
    """
    text = FILES[module].read_text(encoding="utf-8")
    if FILES[module].suffix == ".smk":  # no Python outside of its import lines
        text = "\n".join(match[0].strip() for match in _IMPORT.finditer(text))
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else node.module for name in submodules]
        found += [name for name in names if name in FILES and name != module]
    return found


def test_imports_go_one_way() -> None:
    wrong = []
    for module in FILES:
        package = module.split(".")[0]
        allowed = tuple(f"{name}." for name in (package, "common", *ALLOWED[package]))
        wrong += [f"{module} imports {name}" for name in _imports(module) if not f"{name}.".startswith(allowed)]
    assert wrong == []


def test_modules_import_each_other_in_no_circle() -> None:
    TopologicalSorter({module: _imports(module) for module in FILES}).prepare()  # raises CycleError with the circle


def test_the_corpus_needs_no_torch() -> None:
    """Nor does the start of any other command."""
    names = [name for name in FILES if name.split(".")[0] in ("common", "corpus") and not name.endswith("__main__")]
    names += [name for name in COMMANDS.values() if name.startswith(("training", "convert", "cluster"))]
    code = f"for name in {names}: __import__(name); assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sources = (FILES[name].read_text(encoding="utf-8") for name in FILES if name.split(".")[0] in ("common", "corpus"))
    assert not any("import torch" in source or "from torch" in source for source in sources)
