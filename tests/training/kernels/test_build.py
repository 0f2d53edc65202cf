"""The build of the kernels with a compiler that is a script: cache, lock, failures, and what each device gets."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import KernelError
from tests.conftest import ROOT
from tests.training.helpers import wait_for
from tests.training.kernels.helpers import write_nvcc
from training.kernels import build as building
from training.kernels.build import build, cache_folder, codes_for, covers, find_library, nvcc

BUILDER = """
import fcntl, sys
from pathlib import Path
from common.errors import KernelError
from training.kernels.build import build, nvcc

flock = fcntl.flock
def lock(*arguments):
    try:
        flock(*arguments)
    except BlockingIOError:
        Path(sys.argv[1]).touch()
        raise
fcntl.flock = lock
try:
    print(build(nvcc()))
except KernelError as error:
    print("error:", error)
"""
Patch = pytest.MonkeyPatch


def builder(waiting: Path = Path(os.devnull)) -> "subprocess.Popen[str]":
    """Another process that builds; prints the path or the error. Touches a file if it finds the lock taken."""
    return subprocess.Popen([sys.executable, "-c", BUILDER, waiting], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def endings(folder: Path) -> list[str]:
    return sorted(re.sub(r".*-[0-9a-f]{16}", "", path.name) for path in folder.iterdir())


def test_a_library_is_built_once_for_its_sources_and_architectures(tmp_path: Path, monkeypatch: Patch) -> None:
    calls = write_nvcc(tmp_path, monkeypatch)
    library = build(nvcc([90]))
    assert library.read_text() == "library\n" and library.parent == cache_folder()
    assert "code=sm_90" in calls.read_text() and "cross_entropy.cu" in calls.read_text()
    assert build(nvcc([90])) == library != build(nvcc([80]))
    assert len(calls.read_text().splitlines()) == 2

    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/other.cu").write_text("// nothing")
    monkeypatch.setattr(building, "SOURCES", tmp_path / "csrc")
    building._source_key.cache_clear()
    try:
        assert find_library([90]) is None
        assert build(nvcc([90])) != library
    finally:
        building._source_key.cache_clear()


@pytest.mark.parametrize("fails", [False, True])
def test_of_two_processes_one_builds_and_the_other_has_its_outcome(
    tmp_path: Path, monkeypatch: Patch, fails: bool
) -> None:
    errors = "echo 'a.cu(1): warning #1: unused' >&2\necho 'a.cu(3): error: no such thing' >&2\nexit 2" * fails
    calls = write_nvcc(tmp_path, monkeypatch, f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done\n{errors}")
    first = builder()
    wait_for(calls.exists)
    second = builder(tmp_path / "waiting")
    wait_for((tmp_path / "waiting").exists)
    (tmp_path / "go").touch()
    output = first.communicate(timeout=60)[0]
    assert second.communicate(timeout=60)[0] == output
    assert len(calls.read_text().splitlines()) == 1
    if fails:
        assert output.startswith("error: ") and "a.cu(3)" in output and "a.cu(1)" not in output
        assert endings(cache_folder()) == [".failed", ".lock"]
        write_nvcc(tmp_path, monkeypatch)
        build(nvcc())  # a later one tries again
    assert endings(cache_folder()) == [".lock", ".log", ".so"]


def test_a_lock_is_waited_for_no_longer_than_the_limit_and_not_left_by_a_killed_builder(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    calls = write_nvcc(tmp_path, monkeypatch, f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done")
    other = builder()
    wait_for(calls.exists)
    with pytest.raises(KernelError, match=r"\.lock"):
        build(nvcc(), limit=0.3)
    other.send_signal(signal.SIGKILL)
    other.communicate()
    write_nvcc(tmp_path, monkeypatch)
    build(nvcc(), limit=30)  # the compiler of the killed one still runs
    (tmp_path / "go").touch()
    assert endings(cache_folder()) == [".lock", ".log", ".so"]


def test_each_device_gets_code_that_it_runs(tmp_path: Path, monkeypatch: Patch) -> None:
    known = {75, 80, 86, 90, 120}
    assert codes_for([], known) == ["sm_75", "sm_80", "sm_90", "compute_90"]
    assert codes_for([90, 90, 86], known) == ["sm_86", "sm_90"]
    assert codes_for([100, 130], known) == ["compute_120", "compute_90"]
    with pytest.raises(KernelError, match="sm_70"):
        codes_for([90, 70], known)
    assert covers(["sm_80"], 89) and not covers(["sm_80"], 90) and not covers(["sm_86"], 80)
    assert covers(["compute_80"], 120) and not covers(["compute_90"], 89)
    write_nvcc(tmp_path, monkeypatch)
    assert find_library([90]) is None
    usual, newer = build(nvcc()), build(nvcc([90]))
    monkeypatch.setattr(building, "find_nvcc", lambda: None)  # a machine without nvcc uses what another has built
    os.utime(usual, (1, 1))
    assert find_library([90]) == newer
    assert find_library([86]) == usual and find_library([90, 75]) == usual
    assert find_library([61]) is None
