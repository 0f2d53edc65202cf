"""Every command: --help is quick and shows an example, a wrong argument gives one line and exit code 2."""

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT, Command
from tests.helpers import assert_one_line_error

COMMANDS = (
    "corpus.blacklist", "corpus.scrape", "corpus.ingest", "corpus.clean", "corpus.decontaminate", "corpus.dedup",
    "corpus.train_tokenizer", "corpus.tokenize", "corpus.merge_index", "corpus.index", "training.train",
    "training.evaluate", "training.plan", "training.probe",
    "training.generate", "training.kernels", "convert.merge_mp", "cluster.submit", "cluster.status", "cluster.logs",
    "cluster.cancel", "cluster.preflight", "cluster.autotune", "common.init", "report", "demo", "demo.build",
    "demo.serve",
    "benchmarks.corpus", "benchmarks.gpu",
)  # fmt: skip
PACKAGES = (
    *("corpus", "training", "convert", "cluster", "corpus.scrape", "corpus.dedup", "corpus.index"),
    *("training.kernels", "report", "demo", "benchmarks.gpu"),
)


@pytest.mark.parametrize("module", COMMANDS)
def test_help_shows_an_example(module: str, command: Command) -> None:
    result = command(module, "--help", timeout=60)
    assert result.returncode == 0 and result.stderr == ""
    assert re.search(rf"^ +(torchrun .*)?python -m {module}\b", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("module", COMMANDS)
def test_a_wrong_argument_is_one_line(module: str, command: Command) -> None:
    assert_one_line_error(command(module, "--no-such-option", timeout=60), f"python -m {module}", "--help")


@pytest.mark.parametrize("module", [name for name in COMMANDS if name.startswith(("training", "convert", "cluster"))])
def test_commands_start_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class _Parsed(Exception):
    """The options were parsed."""


def _documented() -> list[tuple[str, list[str]]]:
    """Every `python -m MODULE …` in the README, the docs and the help texts: its source and its words."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    sources = [
        (path.name, re.findall(r"```\w*\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)) for path in pages
    ]
    sources += [(module, [importlib.import_module(module).__doc__ or ""]) for module in COMMANDS if module != "demo"]
    found = []
    for name, texts in sources:
        for line in "\n".join(texts).replace("\\\n", " ").splitlines():
            match = re.search(r"python -m (\S+)(.*)", line)
            if match and match[1] in COMMANDS:
                words = shlex.split(re.split(r" [|>&]|; ", match[2])[0], comments=True)
                found.append((name, [match[1], *words]))
    return found


def test_every_documented_command_has_options_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    commands = _documented()
    assert {"training.evaluate", "training.generate", "training.train", "convert.merge_mp"} <= {
        c[1][0] for c in commands
    }
    for where, (module, *words) in commands:
        command = importlib.import_module(f"{module}.__main__" if module in PACKAGES else module)
        with pytest.raises(_Parsed):
            command.main(words)
            pytest.fail(f"{where}: {module}")
