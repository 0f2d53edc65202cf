"""The configuration of a lab: slurm.conf, gres.conf and a block of ports that no other lab uses."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SYSTEM_FOLDER = Path("/etc/slurm")  # inside a lab's mount namespace this is the lab's own configuration

_SLURM = """\
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
# short, because of the unix sockets in it: slurmd is in the lab's mount namespace, where this is
# {lab}/etc/spool
SlurmdSpoolDir=/etc/slurm/spool/%n
SlurmctldPidFile={lab}/slurmctld.pid
SlurmdPidFile={lab}/slurmd.%n.pid
SlurmctldLogFile={lab}/slurmctld.log
SlurmdLogFile={lab}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=1,bf_interval=5,sched_interval=5
SlurmdParameters=config_overrides
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=15
ReturnToService=2
MessageTimeout=10
KillWait=5
MinJobAge=600
FirstJobId={first_job}
AccountingStorageType=accounting_storage/none
NodeName=node[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port={node_ports} CPUs=8 {memory}
PartitionName=DEFAULT Nodes=ALL State=UP DefMemPerCPU=100
PartitionName=main Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
PartitionName=low MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
"""


def write_config(lab: Path, nodes: int, gpus: int, first_port: int) -> None:
    """Write slurm.conf and gres.conf to `lab`/etc; the controller listens on `first_port`, node N
    on that plus N.
    """
    folder = lab / "etc"
    text = _SLURM.format(
        lab=lab,
        controller=first_port,
        nodes=nodes,
        node_ports=f"[{first_port + 1}-{first_port + nodes}]" if nodes > 1 else first_port + 1,
        memory="RealMemory=64000" + (f" Gres=gpu:{gpus}" if gpus else ""),
        # job ids from the clock: a fresh controller would reuse ids, and old results would be taken
        # for new ones
        first_job=int(time.time()) % 10**6 + 1,
    )
    (folder / "slurm.conf").write_text(text)
    if gpus:
        (lab / "gpus").mkdir()
        for number in range(gpus):  # Slurm gives out device files only; these are /dev/null
            os.mknod(lab / "gpus" / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        devices = f"{lab}/gpus/gpu[0-{gpus - 1}]" if gpus > 1 else f"{lab}/gpus/gpu0"
        (folder / "gres.conf").write_text(f"NodeName=node[1-{nodes}] Name=gpu File={devices}\n")


@contextmanager
def ports(count: int) -> Iterator[int]:
    """Hold a block of `count` free ports on loopback, below the ephemeral range; yields the first.

    An abstract socket with the block's number is its lock: the kernel drops it when this process
    ends, however it ends.
    """
    for first in range(20000, 32000, 100):
        with socket.socket(socket.AF_UNIX) as lock:
            try:
                lock.bind(f"\0slurm-lab-{first}")
                for port in range(first, first + count):
                    with socket.socket() as probe:
                        probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            yield first
            return
    raise RuntimeError("no free block of ports between 20000 and 32000")
