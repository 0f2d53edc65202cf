"""Every command: --help shows an example, a wrong argument is one line and exit code 2."""

import re

import pytest

from tests.conftest import Command
from tests.helpers import assert_one_line_error, called

COMMANDS = (
    "corpus.blacklist", "corpus.scrape", "corpus.ingest", "corpus.clean", "corpus.decontaminate", "corpus.dedup",
    "corpus.train_tokenizer", "corpus.tokenize", "corpus.merge_index", "corpus.index", "corpus.export",
    "corpus.sample", "corpus.show", "corpus.repeats", "corpus.remove",
    "training.train", "training.evaluate", "training.plan", "training.probe", "training.generate", "training.trace",
    "training.kernels",
    "convert.merge_mp", "convert.to_gguf", "convert.verify", "cluster.submit", "cluster.status", "cluster.logs",
    "cluster.cancel", "cluster.preflight", "cluster.autotune", "common.init", "report", "cards",
    "demo", "demo.build", "demo.serve", "benchmarks.corpus", "benchmarks.gpu",
)  # fmt: skip


@pytest.mark.parametrize("module", COMMANDS)
def test_help_shows_an_example_and_a_wrong_argument_is_one_line(module: str) -> None:
    result = called(module, "--help")
    assert result.returncode == 0 and result.stderr == ""
    assert re.search(rf"^ +(torchrun .*)?python -m {module}\b", result.stdout, re.MULTILINE)
    assert_one_line_error(called(module, "--no-such-option"), f"python -m {module}", "--help")


def test_a_process_has_the_exit_code_of_its_command(command: Command) -> None:
    assert command("corpus.clean", "--help").returncode == 0
    assert_one_line_error(command("corpus.clean", "--input", "none.zst", "--output", "out.zst"), "none.zst")
