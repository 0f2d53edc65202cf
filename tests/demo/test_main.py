import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import InputError
from demo.__main__ import remove_stale_lock, snakemake_is_running

SLOW_RULE = 'rule all:\n    output: "x"\n    shell: "sleep 60"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "Snakefile").write_text(SLOW_RULE)
    return tmp_path


def start(folder: Path) -> "subprocess.Popen[bytes]":
    """Snakemake running in `folder`, with its lock."""
    process = subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "1"], cwd=folder, stderr=subprocess.DEVNULL, process_group=0
    )
    deadline = time.monotonic() + 30
    while not list((folder / ".snakemake" / "locks").glob("*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def test_a_lock_is_removed_only_when_its_owner_is_dead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    process = start(folder)
    try:
        assert snakemake_is_running(folder)
        with pytest.raises(InputError, match="Snakemake is running in this folder"):
            remove_stale_lock(folder)
    finally:
        process.kill()
        process.wait()
    subprocess.run(["pkill", "-KILL", "-g", str(process.pid)], check=False)  # the rule's own processes
    assert not snakemake_is_running(folder)
    assert list((folder / ".snakemake" / "locks").glob("*")), "kill -9 left the lock"
    remove_stale_lock(folder)
    assert not list((folder / ".snakemake" / "locks").glob("*"))


def test_a_folder_without_a_lock_is_left_alone(tmp_path: Path) -> None:
    remove_stale_lock(tmp_path)
    assert list(tmp_path.iterdir()) == []
