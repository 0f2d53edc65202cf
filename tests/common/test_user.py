"""A user id without a name and a home, as in many containers."""

import getpass
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from common.user import name_user
from tests.workflow.pipeline import LINKED, ROOT

UNKNOWN = """
import os, pwd, sys
def unknown(user):
    raise KeyError(user)
pwd.getpwuid = unknown
from snakemake.cli import main
main(sys.argv[1:])
"""
VARIABLES = ("USER", "LOGNAME", "LNAME", "USERNAME", "HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")


@pytest.fixture
def unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No passwd entry, nothing in the environment; the home that the user then gets."""

    def missing(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", missing)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # what the test sets is undone
        monkeypatch.delenv(name)
    return tmp_path / f"urls-to-gpt2-{os.getuid()}"


def test_a_user_without_a_name_and_a_home_gets_both(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name_user()
    assert getpass.getuser() == str(os.getuid()) and Path.home() == unknown
    assert unknown.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("HOME", "/nonexistent")
    name_user()
    assert Path.home() == unknown, "the same folder for each command"


def test_a_home_for_reading_only_stays_and_caches_lie_elsewhere(
    unknown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown.mkdir(mode=0o755)  # others may open it: perhaps another user made it
    monkeypatch.setenv("HOME", str(tmp_path))
    name_user()
    assert "XDG_CACHE_HOME" not in os.environ
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    name_user()
    cache = Path(os.environ["XDG_CACHE_HOME"])
    assert Path.home() == tmp_path and cache.parent == tmp_path and cache != unknown


def test_snakemake_runs_for_a_user_whom_the_machine_does_not_know(tmp_path: Path) -> None:
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "config.yaml").write_text("run: results/x\nsources: [{path: a.txt}]\n")
    known = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", UNKNOWN, "corpus", "-n", "--quiet"]
    environment = {**known, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "ingest" in done.stdout, done.stdout + done.stderr
