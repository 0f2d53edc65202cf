"""Start a Slurm of several nodes in one folder, run commands in it, and kill its parts as a bad day
would.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.helpers import PATIENCE
from tests.slurm.lab import processes
from tests.slurm.lab.config import SYSTEM_FOLDER, ports, write_config

PROGRAMS = ("munged", "slurmctld", "slurmd", "squeue", "unshare", "nsenter")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # Debian installs the daemons in /usr/sbin


def missing() -> str:
    """Why a lab cannot be started here; empty if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    if not SYSTEM_FOLDER.is_dir():
        return f"{SYSTEM_FOLDER}: no such folder (a lab mounts its own over it)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


@dataclass(frozen=True)
class Lab:
    """A running cluster. Its commands share a mount namespace, in which /etc/slurm is the lab's
    configuration.
    """

    folder: Path  # configuration, logs, state and sockets
    environment: dict[str, str]  # finds this cluster from any process, also outside the mount namespace
    nodes: tuple[str, ...]

    def inside(self, cwd: Path | None = None) -> list[str]:
        """What to put in front of a command to run it in the lab's mount namespace and environment,
        in `cwd`.
        """
        namespace = f"--mount=/proc/{(self.folder / 'munged.pid').read_text().strip()}/ns/mnt"
        marks = [f"{name}={self.environment[name]}" for name in ("PATH", "SLURM_CONF", processes.MARK)]
        return ["nsenter", namespace, "--", "env", f"--chdir={cwd or Path.cwd()}", *marks]

    def run(
        self, *command: str, cwd: Path | None = None, timeout: float = PATIENCE, **options: Any
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command in the lab to its end; its exit code is not checked. `options` are
        subprocess.run's.
        """
        options = {"env": self.environment, "capture_output": True, "text": True, "timeout": timeout, **options}
        return subprocess.run([*self.inside(cwd), *command], check=False, **options)

    def start(self, *command: str, cwd: Path | None = None) -> "subprocess.Popen[str]":
        """Start a command in the lab, in a session of its own; its messages are part of its
        output.
        """
        streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([*self.inside(cwd), *command], env=self.environment, start_new_session=True, **streams)

    def check(self, *command: str) -> str:
        """Run a command in the lab and return its output; raises RuntimeError with its messages if
        it fails.
        """
        return _checked(command, self.run(*command))

    def wait(self, condition: Callable[[], object], timeout: float = PATIENCE, log: str = "slurmctld.log") -> None:
        """Wait until `condition` holds; raises TimeoutError with the end of `log` after `timeout`
        seconds.
        """
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.folder / log}:\n{(self.folder / log).read_text()[-2000:]}")
            time.sleep(0.2)

    def job(self, job_id: str | int) -> dict[str, str]:
        """What `scontrol show job` says; raises RuntimeError if there is no such job or no
        controller.
        """
        line = self.check("scontrol", "show", "job", "--oneliner", str(job_id)).splitlines()[0]
        return dict(re.findall(r"(?:^|\s)([A-Z][\w:/\[\]]*)=(.*?)(?=\s+[A-Z][\w:/\[\]]*=|\s*$)", line))

    def wait_saved(self, job_id: str | int) -> None:
        """Wait until the controller has written the job's present state to disk: it does so every
        few seconds.
        """
        mark = f"saved at {time.time()}"
        self.check("scontrol", "update", f"jobid={job_id}", f"admincomment={mark}")
        self.wait(lambda: mark.encode() in (self.folder / "state" / "job_state").read_bytes())

    def wait_idle(self) -> None:
        """Wait until every node is up and without a job."""
        command = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"]
        wanted = {f"{name} idle" for name in self.nodes}
        self.wait(lambda: set(self.run(*command).stdout.splitlines()) == wanted)

    def kill_node(self, name: str) -> None:
        """SIGKILL slurmd, its job steps and their processes: a node that loses power."""
        processes.kill(lambda: processes.of_node(self.folder, name))

    def start_node(self, name: str) -> None:
        """Start slurmd of a node; the controller takes it back within seconds, see `wait_idle`."""
        self.check("slurmd", "-N", name)

    def stop_controller(self) -> None:
        """SIGKILL slurmctld. A job of the last seconds is lost, or runs twice: see `wait_saved`."""
        daemon = psutil.Process(int((self.folder / "slurmctld.pid").read_text()))
        family = [daemon, *daemon.children()]  # it has a helper process
        assert daemon in processes.of_lab(self.folder), "slurmctld.pid names another process"
        processes.kill(lambda: [process for process in family if processes.alive(process)])

    def start_controller(self) -> None:
        """Start slurmctld and wait until it answers."""
        self.check("slurmctld")
        self.wait(lambda: "is UP" in self.run("scontrol", "ping").stdout)


@contextmanager
def slurm(folder: Path, nodes: int = 2, gpus: int = 0) -> Iterator[Lab]:
    """Start a cluster with `gpus` fake GPUs per node in `folder`; all its processes are killed at
    the end.
    """
    if len(str(folder)) > 95:
        raise ValueError(f"{folder}: too long for the unix sockets in it (at most 95 characters)")
    names = tuple(f"node{number}" for number in range(1, nodes + 1))
    for path in ("state", *(f"etc/spool/{name}" for name in names)):
        (folder / path).mkdir(parents=True)
    config = {"SLURM_CONF": str(folder / "etc" / "slurm.conf"), processes.MARK: str(folder)}
    lab = Lab(folder, {**os.environ, "PATH": PATH, **config}, names)
    with ports(nodes + 1) as first_port:
        write_config(folder, nodes, gpus, first_port)
        with processes.killed_at_the_end(folder):
            _start_munge(lab)
            lab.start_controller()
            for name in names:
                lab.start_node(name)
            lab.wait_idle()
            yield lab


def _start_munge(lab: Lab) -> None:
    """Start munged, which also holds the lab's mount namespace: all other processes enter that."""
    key = lab.folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log"}
    flags = [f"--{option}={lab.folder / name}" for option, name in (*files.items(), ("seed-file", "munge.seed"))]
    start = 'mount --bind "$0" "$1" && shift && exec munged --force "$@"'
    mount = [start, str(lab.folder / "etc"), str(SYSTEM_FOLDER)]
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", *mount, *flags]
    _checked(command, subprocess.run(command, env=lab.environment, capture_output=True, text=True, check=False))
    lab.wait((lab.folder / "munged.pid").exists, log="munged.log")


def _checked(command: Sequence[str], result: "subprocess.CompletedProcess[str]") -> str:
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout
