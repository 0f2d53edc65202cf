import subprocess
import sys

import pytest

from common import verbs
from common.errors import InputError
from tests.conftest import Command
from tests.test_commands import COMMANDS

PACKAGES = ("corpus", "training", "convert", "cluster")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_command_of_a_package_is_listed_with_a_sentence(package: str) -> None:
    found = verbs.commands(package)
    assert {name.removeprefix(f"{package}.") for name in COMMANDS if name.startswith(f"{package}.")} <= set(found)
    for name, sentence in found.items():
        assert sentence.endswith(".") and len(sentence) > 20, name


def test_a_list_names_first_what_is_run_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.main("corpus", ("scrape", "clean"), []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("python -m corpus.scrape  ") and lines[1].startswith("python -m corpus.clean  ")
    assert lines[2].startswith("python -m corpus.blacklist  ") and lines[-1] == "each explains itself with --help"


def test_a_command_that_does_not_exist_is_one_line_with_the_closest(command: Command) -> None:
    result = command("corpus", "clena")
    assert result.returncode == 2
    assert result.stderr == "error: python -m corpus: no command 'clena' (did you mean 'clean'?)\n"
    with pytest.raises(InputError, match="no command 'x'; python -m cluster lists the commands"):
        verbs.main("cluster", (), ["x"])


def test_a_command_may_follow_its_package_as_a_word(command: Command) -> None:
    result = command("cluster", "status", "--help")
    assert result.returncode == 0 and result.stdout.startswith("usage: python -m cluster.status ")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_list_imports_no_command(package: str) -> None:
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
    assert len(listed) == len(verbs.commands(package))
