"""Imports go one way: between packages, inside `training` between layers, inside `corpus` from steps to rooms."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

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
COMMANDS = {"train", "evaluate", "generate", "plan", "run_plan", "probe"}
FOUNDATION = {"logits_memory", "kernels", "model", "precision", "model_folder", "leaving"}


def _layer(module: str) -> int:
    """How high a module of `training` stands."""
    name = module.split(".")[1] if "." in module else module
    return 4 if name in COMMANDS else {"trainer": 3, "step": 2}.get(name, 0 if name in FOUNDATION else 1)


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module(path): path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))}


def _imports(module: str) -> Iterator[str]:
    """The modules of ours that a module imports, at its top, inside functions or for types alone."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else node.module for name in submodules]
        yield from (name for name in names if name in FILES and name != module)


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module in FILES
        if module.split(".")[0] == package
        for name in _imports(module)
        if name.split(".")[0] not in (package, "common")
        and not any(name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED[package])
    ]
    assert wrong == []


def test_layers_of_training_import_downward() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in FILES
        if module.startswith("training.")
        for name in _imports(module)
        if name.startswith("training.") and _layer(name) > _layer(module)
    ]
    assert wrong == []


def test_rooms_of_the_corpus_import_no_step() -> None:
    steps = {module for module in FILES if module.startswith("corpus.") and module.count(".") == 1}
    steps -= {module for module in steps if FILES[module].name == "__init__.py"} | {"corpus.runner"}
    wrong = [
        f"{module} imports {name}"
        for module in FILES
        if module.startswith("corpus.") and module.count(".") > 1 and not module.endswith("__main__")
        for name in _imports(module)
        if name in steps
    ]
    assert wrong == []


def test_modules_import_each_other_in_no_circle() -> None:
    _assert_no_circle({module: set(_imports(module)) for module in FILES})


def test_rooms_import_each_other_in_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module in FILES:
        if "." in module:  # the __init__ of a package re-exports its modules
            graph.setdefault(_room(module), set()).update({_room(name) for name in _imports(module)} - {_room(module)})
    _assert_no_circle(graph)


def _room(module: str) -> str:
    """`corpus.scrape` for corpus.scrape.fetch; a module at the top of its package stands for itself."""
    return ".".join(module.split(".")[:2])


def _assert_no_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_corpus_needs_no_torch() -> None:
    corpus = [name for name in FILES if name.split(".")[0] in ("common", "corpus") and not name.endswith("__main__")]
    code = "; ".join(f"import {name}" for name in corpus) + "; import sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sources = (FILES[name].read_text(encoding="utf-8") for name in FILES if name.split(".")[0] in ("common", "corpus"))
    assert not any("import torch" in source or "from torch" in source for source in sources)
