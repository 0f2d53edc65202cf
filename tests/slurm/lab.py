"""A real Slurm on this machine: munged, slurmctld and several slurmd on loopback, all in one temporary folder.

    python -m tests.slurm.lab -- sinfo
    python -m tests.slurm.lab --nodes 4 --gpus 2 -- srun --nodes 4 --gres gpu:1 hostname

The command line starts a cluster, runs a command in it, takes the cluster down by process id and returns the command's
exit code; `make slurm-lab` opens a shell. It has its own mount namespace, in which /etc/slurm is the lab's, so nothing
outside its folder is touched. Partition `main` is the default; jobs in `low` are requeued if `main` needs their nodes.
The GPUs are fake: Slurm counts them and sets CUDA_VISIBLE_DEVICES.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "squeue")
SYSTEM_FOLDER = Path("/etc/slurm")
ENVIRONMENT = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}  # where Debian installs the daemons

CONFIG = """
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is short, so that a requeued job waits seconds, not minutes
AuthInfo=socket={lab}/munge.sock,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={lab}/state
SlurmdSpoolDir={lab}/spool/%n
SlurmctldPidFile={lab}/slurmctld.pid
SlurmdPidFile={lab}/slurmd.%n.pid
SlurmctldLogFile={lab}/slurmctld.log
SlurmdLogFile={lab}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=1,bf_interval=5,sched_interval=5
SlurmdParameters=config_overrides
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
MessageTimeout=10
KillWait=5
MinJobAge=600
FirstJobId={first_job}
NodeName=node[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port={node_ports} CPUs=8 RealMemory=64000{gres}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP DefMemPerCPU=100 PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP DefMemPerCPU=100 PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
"""


def missing() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=ENVIRONMENT["PATH"]) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


def _free_ports(count: int) -> int:
    """The first of `count` consecutive free ports, below the system's ephemeral range."""
    for first in range(21000 + os.getpid() % 7000, 32000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, probe in enumerate(sockets):
                probe.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for probe in sockets:
                probe.close()
    raise RuntimeError("no free ports")


@contextmanager
def slurm(lab: Path, nodes: int = 2, gpus: int = 0, system_wide: bool = False) -> Iterator[dict[str, str]]:
    """Start the daemons; yields the environment variables with which Slurm's commands find them.

    `gpus` is the number of fake GPUs per node. `system_wide` mounts the lab's configuration over /etc/slurm: for a
    process in a mount namespace of its own.
    """
    names = [f"node{number}" for number in range(1, nodes + 1)]
    for folder in ("state", "etc", "gpus", *(f"spool/{name}" for name in names)):
        (lab / folder).mkdir(parents=True)
    (lab / "munge.key").write_bytes(os.urandom(1024))
    (lab / "munge.key").chmod(0o400)
    first = _free_ports(nodes + 1)
    text = CONFIG.format(
        lab=lab,
        controller=first,
        nodes=nodes,
        node_ports=f"[{first + 1}-{first + nodes}]" if nodes > 1 else first + 1,
        gres=f" Gres=gpu:{gpus}" if gpus else "",
        # job ids from the clock: a fresh controller would reuse ids, and old results would be taken for new ones
        first_job=int(time.time()) % 10**6 + 1,
    )
    (lab / "etc" / "slurm.conf").write_text(text)
    if gpus:
        for number in range(gpus):  # Slurm gives out device files only; these are /dev/null
            os.mknod(lab / "gpus" / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        devices = f"{lab}/gpus/gpu[0-{gpus - 1}]" if gpus > 1 else f"{lab}/gpus/gpu0"
        (lab / "etc" / "gres.conf").write_text(f"NodeName=node[1-{nodes}] Name=gpu File={devices}\n")
    environment = {**os.environ, **ENVIRONMENT, "SLURM_CONF": str(lab / "etc" / "slurm.conf")}

    def run(*command: str) -> None:
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=30)

    try:
        if system_wide:
            run("mount", "--bind", str(lab / "etc"), str(SYSTEM_FOLDER))
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{option}={lab / name}" for option, name in (*files.items(), ("seed-file", "munge.seed"))]
        run("munged", "--force", *options)
        run("slurmctld", "-i")
        for name in names:
            run("slurmd", "-N", name)
        deadline = time.monotonic() + 30
        while _idle_nodes(environment) < nodes:
            assert time.monotonic() < deadline, (lab / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.2)
        yield environment
    finally:
        for name in (*(f"slurmd.{name}" for name in names), "slurmctld", "munged"):
            _stop(lab / f"{name}.pid")
        if system_wide:
            run("umount", str(SYSTEM_FOLDER))


def _idle_nodes(environment: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--partition=main", "--format=%N"]
    return len(subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.split())


def _stop(pid_file: Path) -> None:
    """End the daemon that wrote `pid_file`, and its children."""
    if not pid_file.exists():
        return
    try:
        daemon = psutil.Process(int(pid_file.read_text()))
        family = [daemon, *daemon.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    daemon.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=10)
    for process in alive:
        process.kill()


_NAMESPACE = "SLURM_LAB_NAMESPACE"  # set in the process that has its own mount namespace


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code of the command that ran in the lab."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.slurm.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="nodes of 8 CPUs (default 2)")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="fake GPUs per node (default 0)")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --: what to run in the lab")
    arguments = parser.parse_args(argv)
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    if _NAMESPACE not in os.environ:
        given = sys.argv[1:] if argv is None else argv
        unshare = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.slurm.lab", *given]
        os.execvpe("unshare", unshare, {**os.environ, _NAMESPACE: "1"})
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGHUP, _exit)
    with TemporaryDirectory(prefix="slurm-lab-") as folder:
        with slurm(Path(folder), arguments.nodes, arguments.gpus, system_wide=True) as environment:
            del environment[_NAMESPACE]
            code = subprocess.run(arguments.command, env=environment, check=False).returncode
    return code if code >= 0 else 128 - code


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
