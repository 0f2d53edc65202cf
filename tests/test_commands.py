"""Every command: --help shows an example, a wrong argument is one line and exit code 2."""

import os
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import version

import pytest

from common.commands import COMMANDS
from tests.conftest import Command
from tests.helpers import assert_one_line_error, called

MODULES = (*COMMANDS.values(), "benchmarks.corpus", "benchmarks.gpu")


@pytest.mark.parametrize("module", MODULES)
def test_help_shows_an_example_and_a_wrong_argument_is_one_line(module: str) -> None:
    result = called(module, "--help")
    assert result.returncode == 0 and result.stderr == ""
    assert re.search(rf"^ +(torchrun .*)?python -m {module}\b", result.stdout, re.MULTILINE)
    assert_one_line_error(called(module, "--no-such-option"), f"python -m {module}", "--help")


def test_the_console_command_lists_every_command_and_runs_one(command: Command) -> None:
    console = partial(called, "common.commands")
    text = console("--help").stdout
    listed = re.findall(r"^    (\S+) +[A-Z].+[.;]", text, re.MULTILINE)
    assert re.search(r"^    report .* \(workflow\.report\)$", text, re.MULTILINE)
    assert listed == list(COMMANDS) and "corpus.clean" in listed
    assert console("--version").stdout.strip() == version("urls-to-gpt2")
    assert_one_line_error(console("corpus.clan"), "urls-to-gpt2: error: no command", "did you mean 'corpus.clean'?")
    for name in ("show", "workflow.provenance.show"):
        assert_one_line_error(console(name), "did you mean 'corpus.show'?")
    ran = command("common.commands", "corpus.clean", "--input", "none.zst", "--output", "out.zst")
    assert_one_line_error(ran, "none.zst")


def test_a_shell_completes_commands_and_their_options() -> None:
    pytest.importorskip("argcomplete")
    asked = {
        "urls-to-gpt2 corpus.cl": {"corpus.clean "},
        "urls-to-gpt2 corpus.clean --rej": {"--rejects "},
    }
    for line, words in asked.items():
        told = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n"}
        shell = [*("bash", "-c", '"$0" "$@" 8>&1 9>/dev/null'), sys.executable, "-m", "common.commands"]
        done = subprocess.run(shell, env={**os.environ, **told}, capture_output=True, text=True, check=True)
        assert set(done.stdout.split("\n")) == words
