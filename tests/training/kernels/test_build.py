"""The kernels' build with a script as the compiler: cache, lock, failures, devices."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import KernelError
from tests.conftest import ROOT
from tests.helpers import wait_for
from tests.training.kernels.helpers import write_nvcc
from training.kernels import build as building
from training.kernels.build import build, cache_folder, find_libraries, find_nvcc, nvcc

Patch = pytest.MonkeyPatch


def builder() -> "subprocess.Popen[str]":
    """Another process that builds; prints the path."""
    code = "from training.kernels.build import build, nvcc; print(build(nvcc()))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def endings(folder: Path) -> list[str]:
    return sorted(re.sub(r".*-[0-9a-f]{16}", "", path.name) for path in folder.iterdir())


def test_a_library_is_built_once_for_its_sources_and_architectures(tmp_path: Path, monkeypatch: Patch) -> None:
    calls = write_nvcc(tmp_path, monkeypatch)
    library = build(nvcc(90))
    assert library.read_text() == "library\n" and library.parent == cache_folder()
    assert "-arch=sm_90" in calls.read_text() and "gelu.cu" in calls.read_text()
    assert build(nvcc(90)) == library != build(nvcc(80))
    assert len(calls.read_text().splitlines()) == 2
    compiler = nvcc(90)
    assert replace(compiler, flags=(*compiler.flags, "-G")).library != library
    with monkeypatch.context() as patch:
        patch.setattr(building, "_version", lambda _path: "fake 2.0")
        assert compiler.library != library

    folder, before = tmp_path / "csrc", {library}
    folder.mkdir()
    monkeypatch.setattr(building, "SOURCES", folder)
    try:
        for name, text in ("other.cu", ""), ("other.cu", "// more"), ("head.cuh", ""), ("head.cuh", "// more"):
            (folder / name).write_text(text)
            building._stem.cache_clear()
            assert find_libraries(90) == []
            before.add(build(compiler))
        (folder / "head.cuh").rename(folder / "file.cuh")
        building._stem.cache_clear()
        assert len({*before, compiler.library}) == 6
    finally:
        building._stem.cache_clear()


def test_of_two_processes_one_builds_and_a_killed_one_blocks_nobody(tmp_path: Path, monkeypatch: Patch) -> None:
    waits = f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done"
    calls = write_nvcc(tmp_path, monkeypatch, waits)
    killed = builder()
    wait_for(calls.exists)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    calls.unlink()
    first, second = builder(), builder()
    wait_for(calls.exists)
    (tmp_path / "go").touch()
    outputs = {process.communicate()[0] for process in (first, second)}
    assert len(outputs) == 1 and len(calls.read_text().splitlines()) == 1
    assert {".lock", ".so"} <= set(endings(cache_folder()))


def test_a_build_that_takes_too_long_or_fails_is_one_line_and_leaves_no_library(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    write_nvcc(tmp_path, monkeypatch, "sleep 60")
    with pytest.raises(KernelError, match="still compiling after"):
        build(nvcc(), limit=0.3)
    write_nvcc(
        tmp_path, monkeypatch, "echo 'a.cu(1): warning #1: unused'; echo 'a.cu(3): error: no such thing'; exit 2"
    )
    with pytest.raises(KernelError, match=r"a\.cu\(3\)"):
        build(nvcc())
    assert endings(cache_folder()) == [".lock"]


def test_a_machine_without_nvcc_uses_what_another_has_built(tmp_path: Path, monkeypatch: Patch) -> None:
    write_nvcc(tmp_path, monkeypatch)
    assert find_libraries(90) == []
    usual, newer = build(nvcc()), build(nvcc(90))
    monkeypatch.setattr(building, "find_nvcc", lambda: None)
    os.utime(usual, (1, 1))
    assert find_libraries(90) == [newer, usual] and find_libraries(86) == [usual]


def test_nvcc_is_the_named_one_then_that_on_the_path_then_pips(tmp_path: Path, monkeypatch: Patch) -> None:
    write_nvcc(tmp_path, monkeypatch)
    write_nvcc(tmp_path / "site/nvidia", monkeypatch)
    pips = (tmp_path / "site/nvidia/cuda").rename(tmp_path / "site/nvidia/cu13") / "bin/nvcc"
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert find_nvcc() == str(tmp_path / "cuda/bin/nvcc")
    monkeypatch.delenv("CUDA_HOME")
    assert find_nvcc() == str(pips)
    monkeypatch.setenv("PATH", str(tmp_path / "cuda/bin"))
    assert find_nvcc() == str(tmp_path / "cuda/bin/nvcc")
