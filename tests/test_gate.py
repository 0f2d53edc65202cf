"""What keeps `make test` from being red by chance: time for fixtures, folders that nobody changes,
seeds, a load.
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.conftest import ROOT
from tests.helpers import new_seed

SLOW_FIXTURE = """
import time, pytest
@pytest.fixture
def slow():
    time.sleep(4)
def test_fast(slow): pass
def test_slow(): time.sleep(60)
"""


def test_the_time_of_a_fixture_is_not_that_of_its_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SLOW_FIXTURE)
    options = ("-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider", "-o", "pythonpath=", "--timeout", "3")
    command = [sys.executable, "-m", "pytest", *options, tmp_path / "test_it.py"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert "1 failed, 1 passed" in done.stdout and "test_slow - Failed: Timeout" in done.stdout, done.stdout


def test_a_test_that_changes_what_others_share_is_found(tmp_path: Path) -> None:
    make = conftest.once._get_wrapped_function()
    shared = make(SimpleNamespace(getbasetemp=lambda: tmp_path), "master")
    once = next(shared)
    folder = once("run", lambda folder: (folder / "model").write_text("weights"))
    assert once("run", lambda _: pytest.fail("it is built once")) == folder
    (folder / "cache").touch()
    with pytest.raises(AssertionError, match=r"others share; let it work on a copy: .*/cache 0 bytes"):
        next(shared)


def test_a_seed_is_shown_and_taken_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seed = new_seed()
    assert capsys.readouterr().out == f"TEST_SEED={seed}\n"
    monkeypatch.setenv("TEST_SEED", str(seed))
    assert new_seed() == seed


def test_a_command_beside_a_load_keeps_its_exit_code() -> None:
    assert (
        subprocess.run([sys.executable, "-m", "tests.load", "2", "--", "sh", "-c", "exit 3"], cwd=ROOT).returncode == 3
    )
