"""A wheel built from the tree is complete, and runs outside it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from common.init import PARTS, SCHEMA, start, workflow_files
from common.settings import ScrapeSettings
from tests.conftest import ROOT
from tests.helpers import assert_one_line_error, called

PACKAGES = ("common", "corpus", "training", "convert", "cluster", "workflow")
TOP = {part.partition("/")[0] for part in PARTS}
NEEDED = (*{*PACKAGES, *TOP}, "benchmarks", "pyproject.toml", "README.md", "LICENSE")


def test_the_torch_of_the_gate_is_the_oldest_that_is_allowed_or_newer() -> None:
    files = [(ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")]
    oldest, tested = (re.search(r"\btorch[>=]=(\d+)\.(\d+)", text) for text in files)
    assert oldest and tested and (*map(int, oldest.groups()),) <= (*map(int, tested.groups()),)


def test_every_page_names_the_version_of_pyproject() -> None:
    """The code asks the installed package."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    texts = [(ROOT / name).read_text() for name in ("CITATION.cff", "docs/quickstart.md", "CHANGELOG.md")]
    named = re.findall(r"(?:^ *version:? *=? *\{?|urls_to_gpt2-|^## )(\d[\d.]*\d)", "\n".join(texts), re.MULTILINE)
    assert len(named) >= 3 and {*named} == {version}
    assert version.startswith(ScrapeSettings().user_agent.partition("/")[2])


def _run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages_and_of_the_workflow(tmp_path: Path) -> None:
    """And plans the demo where it is installed, outside the tree."""
    (tmp_path / "tree").mkdir()
    for name in (*NEEDED, *(path.name for path in ROOT.glob("snakemake_*"))):
        if (ROOT / name).is_dir():  # without __pycache__: Python may be writing there
            shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path / "tree" / name)
    make = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    _run(sys.executable, "-c", make, cwd=tmp_path / "tree")
    (wheel,) = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    ours = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert ours - names - set(workflow_files()) == set()
    shared = {name.partition("/share/urls-to-gpt2/")[2] for name in names} - {""}
    assert shared == set(workflow_files())
    (scripts,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "urls-to-gpt2 = common.commands:main" in archive.read(scripts).decode()

    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv/bin/python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # the dependencies; .pth files in there, such as that of an editable install, are not read
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    _run(tmp_path / "venv/bin/urls-to-gpt2", "init", "work", cwd=tmp_path)
    where = _run(python, "-c", "import common; print(common.__file__)", cwd=tmp_path / "work").strip()
    assert Path(where).is_relative_to(site)
    _run(python, "-m", "snakemake", "-n", "all", "--profile", "slurm", cwd=tmp_path / "work")


def test_a_working_folder_is_started_once_and_never_overwritten_unasked(tmp_path: Path) -> None:
    assert len(start(tmp_path / "runs")) == len(workflow_files()) + 1
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {*TOP, SCHEMA}
    for path in (tmp_path / "runs").glob("**/*.yaml"):  # editors find the schema of those that are configurations
        first = path.read_text(encoding="utf-8").partition("\n")[0].partition("yaml-language-server: $schema=")[2]
        assert not first or (path.parent / first).samefile(tmp_path / "runs" / SCHEMA)
        assert first or path.name == "config.v8+.yaml"
    assert start(tmp_path / "runs") == []
    (tmp_path / "runs/config.yaml").write_text("run: mine\n")
    assert_one_line_error(called("common.init", str(tmp_path / "runs")), "config.yaml", "--force")
    assert (tmp_path / "runs/config.yaml").read_text() == "run: mine\n"
    assert start(tmp_path / "runs", force=True) == [tmp_path / "runs/config.yaml"]
