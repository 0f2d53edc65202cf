import pytest

from common import verbs
from tests.common.commands import here
from tests.conftest import Command
from tests.helpers import assert_one_line_error


def test_a_package_lists_its_commands_and_runs_the_named_one_or_names_the_closest(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verbs.main("corpus", ("scrape", "clean"), []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[:3]] == ["corpus.scrape", "corpus.clean", "corpus.blacklist"]
    assert command("cluster", "status", "--help").stdout.startswith("usage: python -m cluster.status ")
    assert_one_line_error(here(capsys, "corpus", "clena"), "'clena'", "'clean'")
