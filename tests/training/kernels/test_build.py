"""The build of the kernels with a compiler that is a script: cache, lock, failures, and what each device gets."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import KernelError
from tests.conftest import ROOT
from training.kernels import build as building
from training.kernels.build import build, cache_folder, codes_for, covers, find_library, nvcc

NVCC = """#!/bin/sh
case "$1" in
--version) echo "fake 1.0"; exit;;
--list-gpu-arch) printf 'compute_75\\ncompute_80\\ncompute_90\\n'; exit;;
esac
echo "$$ $@" >> "{calls}"
while [ "$1" != -o ]; do shift; done
echo partial > "$2"
{body}
echo library > "$2"
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Installs an nvcc that runs some shell commands while it compiles; returns the file that lists its calls."""

    def install(body: str = "") -> Path:
        script, calls = tmp_path / "cuda/bin/nvcc", tmp_path / "calls"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(NVCC.format(calls=calls, body=body))
        script.chmod(0o755)
        return calls

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("URLS_TO_GPT2_KERNELS", str(tmp_path / "cache"))
    return install


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


def builder(waiting: Path = Path(os.devnull)) -> "subprocess.Popen[str]":
    """Another process that builds; prints the path or the error. Touches a file if it finds the lock taken."""
    return subprocess.Popen([sys.executable, "-c", BUILDER, waiting], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


def runs(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    try:
        return state.read_text().split()[2] not in "ZX"
    except FileNotFoundError:
        return False


def names(folder: Path) -> list[str]:
    return sorted(re.sub(r".*-[0-9a-f]{16}", "", path.name) for path in folder.iterdir())


def test_a_library_is_built_once(fake: Callable[[str], Path]) -> None:
    calls = fake("")
    library = build(nvcc([90]))
    assert library.read_text() == "library\n" and library.parent == cache_folder()
    assert "code=sm_90" in calls.read_text() and "cross_entropy.cu" in calls.read_text()
    assert build(nvcc([90])) == library
    assert len(calls.read_text().splitlines()) == 1
    assert build(nvcc([80])) != library
    assert len(calls.read_text().splitlines()) == 2
    assert names(library.parent) == [".lock", ".lock", ".log", ".log", ".so", ".so"]


def test_another_source_is_another_library(
    fake: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("")
    first = build(nvcc())
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "other.cu").write_text("// nothing")
    monkeypatch.setattr(building, "SOURCES", sources)
    building._source_key.cache_clear()
    try:
        assert find_library([90]) is None
        assert build(nvcc()) != first
    finally:
        building._source_key.cache_clear()


def test_two_processes_build_once(fake: Callable[[str], Path], tmp_path: Path) -> None:
    calls = fake(f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done")
    first = builder()
    wait_for(calls)
    second = builder(tmp_path / "waiting")
    wait_for(tmp_path / "waiting")
    (tmp_path / "go").touch()
    assert first.communicate(timeout=60) == second.communicate(timeout=60)
    assert len(calls.read_text().splitlines()) == 1


def test_a_failed_build_gives_the_first_error_and_who_waited_does_not_build_again(
    fake: Callable[[str], Path], tmp_path: Path
) -> None:
    calls = fake(
        f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done\n"
        "echo 'a.cu(1): warning #1: unused' >&2\necho 'a.cu(3): error: no such thing' >&2\necho '2 errors' >&2\nexit 2"
    )
    first = builder()
    wait_for(calls)
    second = builder(tmp_path / "waiting")
    wait_for(tmp_path / "waiting")
    (tmp_path / "go").touch()
    outputs = {first.communicate(timeout=60)[0], second.communicate(timeout=60)[0]}
    assert outputs == {f"error: {tmp_path}/cuda/bin/nvcc: a.cu(3): error: no such thing\n"}
    assert len(calls.read_text().splitlines()) == 1
    assert names(cache_folder()) == [".failed", ".lock"]
    fake("")
    build(nvcc())  # a later one tries again
    assert names(cache_folder()) == [".lock", ".log", ".so"]


def test_a_killed_builder_leaves_no_lock(fake: Callable[[str], Path], tmp_path: Path) -> None:
    calls = fake(f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done")
    killed = builder()
    wait_for(calls)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert any(path.is_dir() for path in cache_folder().iterdir())
    fake("")
    build(nvcc(), limit=30)  # the compiler of the killed one still runs
    (tmp_path / "go").touch()
    assert names(cache_folder()) == [".lock", ".log", ".so"]


def test_a_lock_is_waited_for_no_longer_than_the_limit(fake: Callable[[str], Path], tmp_path: Path) -> None:
    calls = fake(f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done")
    other = builder()
    wait_for(calls)
    with pytest.raises(KernelError, match=r"\.lock: another process has held this lock for 0 s"):
        build(nvcc(), limit=0.3)
    (tmp_path / "go").touch()
    other.communicate(timeout=60)


def test_a_compiler_that_hangs_is_stopped_with_its_children(fake: Callable[[str], Path], tmp_path: Path) -> None:
    calls = fake(f"sleep 60 & echo $! > {tmp_path}/child\nwait")
    with pytest.raises(KernelError, match="still compiling after 1 s; stopped"):
        build(nvcc(), limit=1)
    processes = [int(calls.read_text().split()[0]), int((tmp_path / "child").read_text())]
    end = time.monotonic() + 10
    while any(map(runs, processes)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(runs, processes))
    assert ".so" not in names(cache_folder())


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_is_read_only_is_read(fake: Callable[[str], Path], tmp_path: Path) -> None:
    fake("")
    library = build(nvcc([90]))
    cache_folder().chmod(0o500)
    try:
        assert build(nvcc([90])) == library
        with pytest.raises(KernelError, match=r"Permission denied; \$URLS_TO_GPT2_KERNELS may name another"):
            build(nvcc([80]))
    finally:
        cache_folder().chmod(0o700)


def test_a_cache_that_cannot_be_made_names_the_variable(
    fake: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("")
    (tmp_path / "file").touch()
    monkeypatch.setenv("URLS_TO_GPT2_KERNELS", str(tmp_path / "file/cache"))
    with pytest.raises(KernelError, match=r"file/cache: Not a directory; .*URLS_TO_GPT2_KERNELS"):
        build(nvcc())


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("URLS_TO_GPT2_KERNELS", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/urls-to-gpt2/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert cache_folder() == Path("/scratch/urls-to-gpt2/kernels")
    monkeypatch.setenv("URLS_TO_GPT2_KERNELS", "~/kernels")
    assert cache_folder() == Path("/home/someone/kernels")


def test_no_nvcc_is_an_error_that_says_where_it_was_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "find_nvcc", lambda: None)
    with pytest.raises(KernelError, match=r"no nvcc in .*CUDA_HOME"):
        nvcc()


def test_each_device_gets_code_that_it_runs() -> None:
    known = {75, 80, 86, 90, 120}
    assert codes_for([], known) == ["sm_75", "sm_80", "sm_90", "compute_90"]
    assert codes_for([], {50, 70, 75}) == ["sm_75", "compute_75"]
    assert codes_for([90, 90, 86], known) == ["sm_86", "sm_90"]
    assert codes_for([100, 130], known) == ["compute_120", "compute_90"]
    with pytest.raises(KernelError, match="does not compile for sm_70 any more, only for sm_75 and up"):
        codes_for([90, 70], known)
    assert covers(["sm_80"], 89) and not covers(["sm_80"], 90) and not covers(["sm_86"], 80)
    assert covers(["compute_80"], 120) and not covers(["compute_90"], 89)


def test_a_machine_without_nvcc_uses_what_another_has_built(fake: Callable[[str], Path]) -> None:
    fake("")
    assert find_library([90]) is None
    usual, newer = build(nvcc()), build(nvcc([90]))
    os.utime(usual, (1, 1))
    assert find_library([90]) == newer
    assert find_library([86]) == usual and find_library([90, 75]) == usual
    assert find_library([61]) is None
