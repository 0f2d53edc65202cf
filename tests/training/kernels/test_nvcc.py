"""The kernels as nvcc compiles them for each generation of GPUs, on a machine that needs none.

pytest tests/training/kernels/test_nvcc.py -rP      # prints the table of docs/kernels.md
"""

import ctypes
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from tabulate import tabulate

from common.errors import KernelError
from training.kernels.build import SOURCES, nvcc
from training.kernels.library import error_name

pytestmark = pytest.mark.slow  # nvcc takes 25 s of CPU; tests/test_mission.py compiles one kernel
GENERATIONS = ("sm_80", "sm_90", "sm_100", "sm_120")
ACCESSES = {
    "adamw_chunk": (3, 3),
    "gelu_forward<8>": (2, 1),
    "gelu_backward<8>": (3, 1),
    "norm_forward": (4, 2),
    "norm_backward": (7, 6),
    "pack<8>": (1, 1),
    "squares_of_chunk": (1, 0),
}
"""Loads and stores of 16 bytes that each kernel has at least, in every type."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A library for all generations beside its PTX, and what ptxas says about each kernel."""
    folder = tmp_path_factory.mktemp("nvcc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/usr/bin:/bin")  # pip's before the machine's
        for name in ("CUDA_HOME", "CUDA_PATH"):
            patch.delenv(name, raising=False)
        try:
            compiler = nvcc()
        except KernelError as error:
            pytest.skip(f"nvcc compiles the kernels: {error}")
    command = [compiler.path, *(flag for flag in compiler.flags if not flag.startswith("-arch"))]
    for name in GENERATIONS:
        command += ["-gencode", f"arch={name.replace('sm', 'compute')},code={name}"]
    command += ["-Xptxas", "-v", "--keep", "--keep-dir", str(folder), "-o", str(folder / "library.so")]
    done = subprocess.run([*command, *map(str, SOURCES.glob("*.cu"))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "library.so", readable(done.stdout + done.stderr)


def readable(text: str) -> str:
    """With `gelu_forward<__half, 8>` for a mangled name."""
    return subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout


def test_no_kernel_spills_registers(compiled: tuple[Path, str]) -> None:
    found = re.findall(
        r"entry function '(?:void )?(?:.*::)?(\w+).*' for '(\w+)'\n.*\n"
        r" *(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*Used (\d+) registers(?:.* (\d+) bytes smem)?",
        compiled[1],
    )
    assert len(found) == compiled[1].count("Compiling entry function") and {row[1] for row in found} == set(GENERATIONS)
    most: dict[tuple[str, str], int] = defaultdict(int)
    for kernel, generation, *_, registers, shared in found:
        most[kernel, generation] = max(most[kernel, generation], int(registers))
        most[kernel, "shared bytes"] = max(most[kernel, "shared bytes"], int(shared or 0))
    columns = (*GENERATIONS, "shared bytes")
    rows = [(f"`{name}`", *(most[name, column] for column in columns)) for name in sorted({row[0] for row in found})]
    print(tabulate(rows, ("kernel", *columns), "github"))
    assert [row for row in found if row[2:5] != ("0", "0", "0")] == []


@pytest.mark.parametrize("generation", GENERATIONS)
def test_wide_kernels_load_and_store_16_bytes_at_once(compiled: tuple[Path, str], generation: str) -> None:
    paths = compiled[0].parent.glob(f"*.{generation.replace('sm', 'compute')}.ptx")
    seen = set()
    for entry in (entry for path in paths for entry in readable(path.read_text()).split(".entry ")[1:]):
        if name := re.match(r"void (\w+)<(\w+)(?:, \(?(?:int\)?)?(\d))?>", entry):
            kernel = name[1] + f"<{name[3]}>" * bool(name[3])
            for way, least in zip(("ld", "st"), ACCESSES.get(kernel, (0, 0)), strict=True):
                wide = re.findall(rf"\b{way}\.global\S*\.(v4\.[a-z]32|v2\.[a-z]64)", entry)
                assert len(wide) >= least, f"{way} in {kernel} of {name[2]}"
            seen.add(kernel)
    assert seen >= set(ACCESSES)


def test_the_library_can_be_loaded(compiled: tuple[Path, str]) -> None:
    library = ctypes.CDLL(str(compiled[0]))
    assert error_name(library, library.kernels_probe(None)).startswith("cuda")  # its CUDA runtime answers
