"""A real Slurm on this machine: munged, slurmctld and two slurmd on loopback, all in one temporary folder."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "squeue")
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
ReturnToService=2
MessageTimeout=10
KillWait=5
MinJobAge=600
FirstJobId={first_job}
NodeName=node[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{node}-{last_node}] CPUs=8 RealMemory=64000
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP DefMemPerCPU=100
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
def slurm(lab: Path) -> Iterator[dict[str, str]]:
    """Start the daemons; yields the environment variables with which Slurm's commands find them."""
    for folder in ("state", "spool/node1", "spool/node2"):
        (lab / folder).mkdir(parents=True)
    (lab / "munge.key").write_bytes(os.urandom(1024))
    (lab / "munge.key").chmod(0o400)
    first = _free_ports(3)
    # job ids from the clock: a fresh controller would reuse ids, and old results would be taken for new ones
    text = CONFIG.format(
        lab=lab, controller=first, node=first + 1, last_node=first + 2, first_job=int(time.time()) % 10**6 + 1
    )
    (lab / "slurm.conf").write_text(text)
    environment = {**os.environ, **ENVIRONMENT, "SLURM_CONF": str(lab / "slurm.conf")}

    def run(*command: str) -> None:
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=30)

    try:
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{option}={lab / name}" for option, name in (*files.items(), ("seed-file", "munge.seed"))]
        run("munged", "--force", *options)
        run("slurmctld", "-i")
        for node in ("node1", "node2"):
            run("slurmd", "-N", node)
        deadline = time.monotonic() + 30
        while _idle_nodes(environment) < 2:
            assert time.monotonic() < deadline, (lab / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.2)
        yield environment
    finally:
        for name in ("slurmd.node1.pid", "slurmd.node2.pid", "slurmctld.pid", "munged.pid"):
            _stop(lab / name)


def _idle_nodes(environment: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
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
