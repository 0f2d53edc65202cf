"""What holds for every command: --help shows an example and is quick, a wrong argument is one line and exit code 2."""

import re
import subprocess
import sys

import pytest

from tests.conftest import Command
from tests.helpers import assert_one_line_error

COMMANDS = (
    "corpus.blacklist", "corpus.scrape", "corpus.ingest", "corpus.clean", "corpus.decontaminate", "corpus.dedup",
    "corpus.train_tokenizer", "corpus.tokenize", "corpus.merge_index", "corpus.index", "training.train",
    "training.evaluate",
    "training.generate", "convert.merge_mp", "cluster.submit", "cluster.status", "report", "demo", "demo.build",
    "demo.serve", "benchmarks.corpus",
)  # fmt: skip


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
