"""Compiles csrc/ to a shared library in the user's cache, per sources, compiler and architecture.

    path = build(nvcc(90))

The folder is $URLS_TO_GPT2_KERNELS, else urls-to-gpt2/kernels in $XDG_CACHE_HOME or ~/.cache. A
library appears there complete or not at all; of two processes that want it, one waits.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

from common.errors import KernelError
from common.files import cache_path, lock

SOURCES = Path(__file__).parent / "csrc"
FOLDER_VARIABLE = "URLS_TO_GPT2_KERNELS"
_EVERY = "all-major"  # every generation that nvcc knows, and PTX for later ones
_FLAGS = ("-std=c++17", "-O3", "-shared", "--threads", "0", "-Xcompiler", "-fPIC")
_LIMIT = 600.0  # seconds of a compilation, which takes half a minute on a slow machine


@dataclass(frozen=True)
class Compiler:
    """A compiler with its flags."""

    path: str
    flags: tuple[str, ...]
    target: str  # what it compiles for, part of the library's name: sm_80, all-major, host

    @property
    def library(self) -> Path:
        """The path of its library, whose name has a hash of all inputs. Raises KernelError."""
        key = _digest(_version(self.path), self.path, *self.flags)
        return cache_folder() / f"{_stem()}{self.target}-{key}.so"


def cache_folder() -> Path:
    """The folder of compiled libraries; the module docstring has the rule."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "urls-to-gpt2" / "kernels"


def find_nvcc() -> str | None:
    """The path of nvcc in $CUDA_HOME, $CUDA_PATH, on $PATH, of pip, or in /usr/local/cuda."""
    folders = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    packaged = [str(folder) for site in sys.path for folder in sorted(Path(site).glob("nvidia/cu*/bin"), reverse=True)]
    places = [*folders, os.environ.get("PATH", os.defpath), *packaged, "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(places))


def nvcc(capability: int = 0) -> Compiler:
    """nvcc for devices of a compute capability (90: sm_90); 0: for all known and newer ones.

    Raises KernelError if there is no nvcc.
    """
    path = find_nvcc()
    if path is None:
        raise KernelError(
            "no nvcc in $CUDA_HOME, on $PATH, of pip or in /usr/local/cuda; pip install 'urls-to-gpt2[gpu]' has one"
        )
    target = f"sm_{capability}" if capability else _EVERY
    libraries = Path(path).parent.parent / "lib"  # of pip's, which expects a lib64 that it lacks
    return Compiler(path, (*_FLAGS, f"-L{libraries}", f"-arch={target}"), target)


def find_libraries(capability: int) -> list[Path]:
    """Cached libraries of any compiler from these sources for this device, newest first."""
    targets = (_EVERY, f"sm_{capability}")
    paths = [path for target in targets for path in cache_folder().glob(f"{_stem()}{target}-*.so")]
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)


def build(compiler: Compiler, limit: float = _LIMIT) -> Path:
    """Compile the sources, unless the library exists; returns its path.

    Raises KernelError with the compiler's first error, after `limit` seconds, or if the folder
    cannot be written.
    """
    library = compiler.library
    folder = library.parent
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(library.with_suffix(".lock"), "ab") as guard:
            lock(guard, wait=True)
            if not library.exists():
                with cache_path(library) as temporary:
                    _compile(compiler, temporary, limit)
    except OSError as error:
        raise KernelError(
            f"{error.filename or folder}: {error.strerror}; ${FOLDER_VARIABLE} may name another cache folder"
        ) from None
    return library


def _compile(compiler: Compiler, library: Path, limit: float) -> None:
    """Write the library; raises KernelError with the compiler's first error."""
    sources = [str(path) for path in _sources() if path.suffix == ".cu"]
    command = [compiler.path, *compiler.flags, "-o", str(library), *sources]
    with TemporaryFile() as log:  # not a pipe, which the programs that nvcc starts would keep open
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            raise KernelError(f"{compiler.path}: still compiling after {limit:.0f} s; stopped") from None
        log.seek(0)
        text = log.read().decode(errors="replace")
    if done.returncode != 0:
        lines = [line.strip() for line in text.splitlines()]
        errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line)] or [line for line in lines if line]
        raise KernelError(f"{compiler.path}: {errors[0] if errors else f'ended with code {done.returncode}'}")


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cu", ".cuh", ".h"))


@cache
def _stem() -> str:
    """How the names of libraries from these sources begin."""
    texts = [f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in _sources()]
    return f"kernels-{_digest(*texts)}-"


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@cache
def _version(path: str) -> str:
    try:
        return subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"{path}: {error}") from None
