"""Every command: --help shows an example, documented options exist, a wrong argument is one line and exit code 2."""

import argparse
import contextlib
import importlib
import io
import re
import shlex
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from common import cli
from tests.conftest import ROOT, Command
from tests.helpers import assert_one_line_error

COMMANDS = (
    "corpus.blacklist", "corpus.scrape", "corpus.ingest", "corpus.clean", "corpus.decontaminate", "corpus.dedup",
    "corpus.train_tokenizer", "corpus.tokenize", "corpus.merge_index", "corpus.index", "training.train",
    "training.evaluate", "training.plan", "training.probe", "training.generate", "training.kernels", "convert.merge_mp",
    "cluster.submit", "cluster.status", "cluster.logs", "cluster.cancel", "cluster.preflight", "cluster.autotune",
    "common.init", "report", "demo", "demo.build", "demo.serve", "benchmarks.corpus", "benchmarks.gpu",
)  # fmt: skip
PACKAGES = (
    *("corpus", "training", "convert", "cluster", "corpus.scrape", "corpus.dedup", "corpus.index"),
    *("training.kernels", "report", "demo", "benchmarks.gpu"),
)


def main_of(module: str) -> Callable[[list[str]], int]:
    """What `python -m MODULE` calls."""
    main: Callable[[list[str]], int] = importlib.import_module(
        f"{module}.__main__" if module in PACKAGES else module
    ).main
    return main


def called(module: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """How `python -m MODULE WORDS…` ends, run in this process."""
    output, errors, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = cli.run(lambda: main_of(module)(list(words)), signals=False)
        except SystemExit as leave:  # argparse
            code = leave.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess([module, *words], code, output.getvalue(), errors.getvalue())


@pytest.mark.parametrize("module", COMMANDS)
def test_help_shows_an_example_and_a_wrong_argument_is_one_line(module: str) -> None:
    result = called(module, "--help")
    assert result.returncode == 0 and result.stderr == ""
    assert re.search(rf"^ +(torchrun .*)?python -m {module}\b", result.stdout, re.MULTILINE)
    assert_one_line_error(called(module, "--no-such-option"), f"python -m {module}", "--help")


def test_a_process_has_the_exit_code_of_its_command(command: Command) -> None:
    assert command("corpus.clean", "--help").returncode == 0
    assert_one_line_error(command("corpus.clean", "--input", "none.zst", "--output", "out.zst"), "none.zst")


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
        c[0] for _, c in commands
    }
    for where, (module, *words) in commands:
        with pytest.raises(_Parsed):
            main_of(module)(words)
            pytest.fail(f"{where}: {module}")
