"""The processes of a lab, found by the folder in their environment, never by name.

python tests/slurm/lab/processes.py FOLDER    at the end of its input, kill the lab in FOLDER
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

MARK = "LAB_FOLDER"  # in the environment of every process of a lab; Snakemake strips SLURM_*, so it is not called that


def of_lab(folder: Path) -> list[psutil.Process]:
    """Every process of the lab in `folder` and their descendants, except the caller and its
    ancestors.
    """
    return _with_descendants(lambda process: _has(process, MARK, str(folder)))


def of_node(folder: Path, node: str) -> list[psutil.Process]:
    """Slurmd of `node`, its job steps and their processes."""
    log = f"{folder}/slurmd.{node}.log"  # slurmd and slurmstepd keep it open; a step is no child of slurmd

    def belongs(process: psutil.Process) -> bool:
        if not _has(process, MARK, str(folder)):
            return False
        return _has(process, "SLURMD_NODENAME", node) or any(file.path == log for file in process.open_files())

    return _with_descendants(belongs)


def kill(find: Callable[[], list[psutil.Process]], timeout: float = 300) -> None:
    """SIGKILL what `find` returns, again until it returns nothing; raises TimeoutError after
    `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while alive := find():
        if time.monotonic() > deadline:
            raise TimeoutError(f"still alive after SIGKILL: {alive}")
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=1)


@contextmanager
def killed_at_the_end(folder: Path) -> Iterator[None]:
    """Kill the lab in `folder` when the block ends, or when this process does, however that
    ends.
    """
    # in a session of its own, which Ctrl-C and a lost terminal do not reach
    guard = [sys.executable, __file__, str(folder)]
    with subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True) as process:
        yield
    assert process.returncode == 0, "the lab was not killed"


def _has(process: psutil.Process, name: str, value: str) -> bool:
    """Whether this is in the environment; psutil's reader stops at the title that Slurm's daemons
    write over it.
    """
    try:
        return f"\0{name}={value}\0".encode() in b"\0" + Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:  # it has ended
        return False


def _with_descendants(belongs: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    me = psutil.Process()
    spared = {me, *me.parents()}
    found: dict[psutil.Process, None] = {}
    for process in psutil.process_iter():
        try:
            if process not in spared and process.status() != psutil.STATUS_ZOMBIE and belongs(process):
                found.update(dict.fromkeys([process, *process.children(recursive=True)]))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [process for process in found if alive(process)]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.stdin.read()  # ends when the other end is closed: by killed_at_the_end, or by the kernel
    kill(lambda: of_lab(Path(sys.argv[1])))
