"""Imports go one way: between packages, inside `training` between layers, inside `corpus` from steps to subpackages."""

import ast
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.conftest import ROOT
from tests.test_commands import COMMANDS

# what each package may import besides itself and `common`
ALLOWED = {
    "common": set[str](),
    "corpus": set[str](),
    "training": {"corpus.index"},
    "convert": {"training"},
    "cluster": {"training"},
    "report": set[str](),
    "demo": set[str](),
    # Snakemake finds its plugins by the names of these packages
    "snakemake_executor_plugin_slurm_batch": {"cluster"},
    "snakemake_scheduler_plugin_in_order": set[str](),
}
ENTRIES = {"train", "evaluate", "generate", "plan", "run_plan", "probe"}
FOUNDATION = {"logits_memory", "kernels", "model", "precision", "model_folder", "leaving"}


def _layer(module: str) -> int:
    """How high a module of `training` stands."""
    name = module.split(".")[1] if "." in module else module
    return 4 if name in ENTRIES else {"trainer": 3, "step": 2}.get(name, 0 if name in FOUNDATION else 1)


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module(path): path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))}


@cache
def _imports(module: str) -> list[str]:
    """The modules of ours that a module imports, at its top, inside functions or for types alone."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    found: list[str] = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else node.module for name in submodules]
        found += [name for name in names if name in FILES and name != module]
    return found


def _wrong(imported: Callable[[str, str], bool]) -> list[str]:
    """What modules import although `imported(module, name)` says that they must not."""
    return [f"{module} imports {name}" for module in FILES for name in _imports(module) if imported(module, name)]


def test_imports_go_one_way() -> None:
    def forbidden(module: str, name: str) -> bool:
        package = module.split(".")[0]
        others = ALLOWED[package] | {package, "common"}
        return not any(name == allowed or name.startswith(f"{allowed}.") for allowed in others)

    assert _wrong(forbidden) == []


def test_layers_of_training_import_downward() -> None:
    inside = "training."
    assert _wrong(lambda a, b: a.startswith(inside) and b.startswith(inside) and _layer(b) > _layer(a)) == []


def test_subpackages_of_the_corpus_import_no_step() -> None:
    steps = {module for module in FILES if module.startswith("corpus.") and module.count(".") == 1}
    steps -= {module for module in steps if FILES[module].name == "__init__.py"} | {"corpus.runner"}
    inner = {module for module in FILES if module.startswith("corpus.") and module.count(".") > 1}
    assert _wrong(lambda a, b: a in inner and not a.endswith("__main__") and b in steps) == []


def _subpackage(module: str) -> str:
    """`corpus.scrape` for corpus.scrape.fetch; a module at the top of its package stands for itself."""
    return ".".join(module.split(".")[:2])


def test_modules_and_subpackages_import_each_other_in_no_circle() -> None:
    modules = {module: set(_imports(module)) for module in FILES}
    subpackages: dict[str, set[str]] = {}
    for module in FILES:
        if "." in module:  # the __init__ of a package re-exports its modules
            own = _subpackage(module)
            subpackages.setdefault(own, set()).update({_subpackage(name) for name in modules[module]} - {own})
    for graph in (modules, subpackages):
        TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_the_corpus_needs_no_torch() -> None:
    """Nor does the start of any other command."""
    names = [name for name in FILES if name.split(".")[0] in ("common", "corpus") and not name.endswith("__main__")]
    names += [name for name in COMMANDS if name.startswith(("training", "convert", "cluster"))]
    code = f"for name in {names}: __import__(name); assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sources = (FILES[name].read_text(encoding="utf-8") for name in FILES if name.split(".")[0] in ("common", "corpus"))
    assert not any("import torch" in source or "from torch" in source for source in sources)
