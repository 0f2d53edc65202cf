"""Compiles csrc/ to a shared library in the user's cache folder, once per sources, compiler and architectures.

    path = build(nvcc(architectures([90])))

The folder is $URLS_TO_GPT2_KERNELS, else urls-to-gpt2/kernels in $XDG_CACHE_HOME or ~/.cache. A library appears there
complete or not at all. Two processes that want the same one build it once: the second waits. The lock belongs to a
process, not to a file that could be left over.
"""

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import KernelError

SOURCES = Path(__file__).parent / "csrc"
FOLDER_VARIABLE = "URLS_TO_GPT2_KERNELS"
DEFAULT_ARCHITECTURES = (75, 80, 90)
"""Compute capabilities to build for where no device is: Turing, Ampere, Hopper, and PTX for what comes later."""

_FLAGS = ("-std=c++17", "-O3", "-shared", "--threads", "0", "-Xcompiler", "-fPIC", "-Xptxas", "-v")
_HOST_FLAGS = ("-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas")
_LIMIT = 600.0  # seconds, for a compilation and for waiting for one: it takes half a minute on a slow machine
_POLL = 0.1


@dataclass(frozen=True)
class Compiler:
    """A compiler with its flags."""

    path: str
    flags: tuple[str, ...]
    target: str
    """What it compiles for, part of the library's name: sm_75.sm_80, host."""

    def version(self) -> str:
        """What it says about itself. Raises KernelError if it does not run."""
        return _output(self.path, "--version")

    def library(self, folder: Path) -> Path:
        """Where its library is, or will be: the name ends with a hash of all that it depends on."""
        key = _digest(_source_key(), self.version(), self.path, *self.flags)
        return folder / f"{_stem()}{self.target}-{key}.so"


def log_of(library: Path) -> Path:
    """What the compiler said when it made a library: with nvcc, the registers of every kernel."""
    return library.with_suffix(".log")


def cache_folder() -> Path:
    """Where libraries are kept; the module docstring has the rule."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "urls-to-gpt2" / "kernels"


def find_nvcc() -> str | None:
    """The path of nvcc: of $CUDA_HOME or $CUDA_PATH, else on $PATH, else in /usr/local/cuda."""
    folders = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [*folders, os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(places))


def nvcc(capabilities: Sequence[int] = ()) -> Compiler:
    """nvcc for devices of these compute capabilities (90: sm_90); none: for DEFAULT_ARCHITECTURES.

    Raises KernelError if there is no nvcc, or if it does not compile for one of the devices.
    """
    path = find_nvcc()
    if path is None:
        raise KernelError("no nvcc in $CUDA_HOME, on $PATH or in /usr/local/cuda; set CUDA_HOME, or load its module")
    known = {int(number) for number in re.findall(r"compute_(\d+)\b", _output(path, "--list-gpu-arch"))}
    codes = codes_for(capabilities, known)
    flags = [f"-gencode=arch=compute_{code.partition('_')[2]},code={code}" for code in codes]
    return Compiler(path, (*_FLAGS, *flags), ".".join(codes))


def host_compiler() -> Compiler:
    """g++, for libraries that run the kernels on the CPU. Raises KernelError if there is none."""
    path = shutil.which("g++")
    if path is None:
        raise KernelError("no g++ on $PATH")
    return Compiler(path, _HOST_FLAGS, "host")


def codes_for(capabilities: Sequence[int], known: set[int]) -> list[str]:
    """What to compile for: sm_90, or compute_90 (PTX) for a device newer than the compiler.

    Raises KernelError for a device older than the compiler.
    """
    if not known:
        raise KernelError("nvcc does not say which architectures it compiles for")
    if not capabilities:
        usual = [number for number in DEFAULT_ARCHITECTURES if number in known] or [max(known)]
        return [*(f"sm_{number}" for number in usual), f"compute_{usual[-1]}"]
    for number in capabilities:
        if number < min(known):
            raise KernelError(f"this nvcc does not compile for sm_{number} any more, only for sm_{min(known)} and up")
    return sorted({f"sm_{n}" if n in known else f"compute_{max(k for k in known if k < n)}" for n in capabilities})


def covers(codes: Sequence[str], capability: int) -> bool:
    """Whether code for `codes` runs on a device: sm_80 does on 8.0 to 8.9, compute_80 on 8.0 and up."""
    for code in codes:
        kind, _, number = code.partition("_")
        built = int(number)
        if built <= capability and (kind == "compute" or built // 10 == capability // 10):
            return True
    return False


def find_library(capabilities: Sequence[int]) -> Path | None:
    """The newest library in the cache that was built from these sources for such devices, by any compiler."""
    with suppress(OSError):
        found = sorted(cache_folder().glob(f"{_stem()}*.so"), key=lambda path: -path.stat().st_mtime)
        for path in found:
            codes = path.stem.split("-")[-2].split(".")
            if codes != ["host"] and all(covers(codes, capability) for capability in capabilities):
                return path
    return None


def build(compiler: Compiler, limit: float = _LIMIT) -> Path:
    """Compile the sources, unless the library exists; returns its path.

    Raises KernelError with the compiler's first error, after `limit` seconds of compiling or of waiting for another
    process that compiles, and where the cache folder cannot be written.
    """
    folder = cache_folder()
    library = compiler.library(folder)
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        failure = library.with_suffix(".failed")
        before = _read(failure)
        with _locked(library.with_suffix(".lock"), limit):
            if library.exists():
                return library
            if (since := _read(failure)) and since != before:  # the process that had the lock could not build it
                raise KernelError(since.partition("\n")[2])
            _remove_leftovers(library)
            with TemporaryDirectory(dir=folder, prefix=f"{library.stem}.") as scratch:
                try:
                    _compile(compiler, Path(scratch), limit)
                except KernelError as error:
                    failure.write_text(f"{time.time_ns()}\n{error}", encoding="utf-8")
                    raise
                os.replace(Path(scratch, "log"), log_of(library))
                os.replace(Path(scratch, "library.so"), library)
            failure.unlink(missing_ok=True)
    except OSError as error:
        raise KernelError(
            f"{error.filename or folder}: {error.strerror}; ${FOLDER_VARIABLE} may name another cache folder"
        ) from None
    return library


def _compile(compiler: Compiler, scratch: Path, limit: float) -> None:
    """Write library.so into a folder; raises KernelError with the first error."""
    sources = [str(path) for path in _sources() if path.suffix == ".cu"]
    log = scratch / "log"
    with open(log, "wb") as file:
        # in a session of its own: nvcc starts other programs, which must end with it
        process = subprocess.Popen(
            [compiler.path, *compiler.flags, "-o", str(scratch / "library.so"), *sources],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=scratch, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            raise KernelError(f"{compiler.path}: still compiling after {limit:.0f} s; stopped") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line)] or [line for line in lines if line]
        raise KernelError(f"{compiler.path}: {errors[0] if errors else f'ended with code {code}'}")


@contextmanager
def _locked(path: Path, limit: float) -> Iterator[None]:
    """Hold the lock of a file, which the system releases when this process ends, however it ends."""
    with open(path, "ab") as file:
        end = time.monotonic() + limit
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise KernelError(f"{path}: another process has held this lock for {limit:.0f} s") from None
                time.sleep(_POLL)
            except OSError:  # a file system without locks: two builds do no harm
                break
        yield


def _remove_leftovers(library: Path) -> None:
    """Remove what killed builds of this library have left; call it with the lock held."""
    for path in library.parent.glob(f"{library.stem}.*/"):
        shutil.rmtree(path, ignore_errors=True)


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cu", ".cuh", ".h"))


@cache
def _source_key() -> str:
    return _digest(*(f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in _sources()))


def _stem() -> str:
    return f"kernels-{_source_key()}-"


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@cache
def _output(path: str, option: str) -> str:
    try:
        result = subprocess.run([path, option], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{path}: {error}") from None
    if result.returncode != 0:
        raise KernelError(f"{path} {option} ended with code {result.returncode}: {result.stderr.strip()[:200]}")
    return result.stdout
