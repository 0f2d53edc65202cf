import subprocess
import sys

import pytest

from common import verbs
from tests.common.commands import here
from tests.conftest import Command
from tests.helpers import assert_one_line_error


@pytest.mark.parametrize("package", ["corpus", "cluster"])
def test_a_package_lists_its_commands_with_a_sentence_and_imports_none(package: str) -> None:
    found = verbs.commands(package)
    assert len(found) >= 3 and all(sentence.endswith(".") and len(sentence) > 20 for sentence in found.values())
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{package}']\n"
        f"try: runpy.run_module('{package}', run_name='__main__')\n"
        "except SystemExit as leave: assert not leave.code\n"
        f"assert not [name for name in sys.modules if name.startswith('{package}.') and name != '{package}.__main__']\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed = [line for line in done.stdout.splitlines() if line.startswith(f"python -m {package}.")]
    assert len(listed) == len(found)


def test_a_list_names_first_what_is_run_first_and_a_name_runs_its_command_or_names_the_closest(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verbs.main("corpus", ("scrape", "clean"), []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[:3]] == ["corpus.scrape", "corpus.clean", "corpus.blacklist"]
    assert command("cluster", "status", "--help").stdout.startswith("usage: python -m cluster.status ")
    assert_one_line_error(here(capsys, "corpus", "clena"), "'clena'", "'clean'")
