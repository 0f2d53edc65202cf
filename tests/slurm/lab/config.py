"""The configuration of a lab: slurm.conf, gres.conf and a block of ports that no other lab uses."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SYSTEM_FOLDER = Path("/etc/slurm")  # inside a lab's mount namespace this is the lab's own configuration


@dataclass(frozen=True)
class Options:
    """What differs between sites, in slurm.conf's terms; times are in seconds."""

    kill_wait: int = 5  # between SIGTERM and SIGKILL; Slurm's default is 30
    slurmd_timeout: int = 15  # silence after which a node is DOWN; sites have 100 to 300
    grace_time: int = 20  # between the preemption of a job in `low` and its end
    preempt_mode: str = "REQUEUE"  # of partition `low`; or CANCEL
    preempt_send_user_signal: int = 0  # 1: preemption sends the signal of `sbatch --signal` first
    enforce_part_limits: str = "NO"  # NO: a job over a limit waits for ever. ALL: sbatch refuses it
    max_time: str = "INFINITE"  # of a job in `main`, as Slurm writes times: 10 is minutes, 1:00:00 an hour


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
# short, because of the unix sockets in it: slurmd is in the lab's mount namespace, where this is {lab}/etc/spool
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
PreemptMode={o.preempt_mode}
{user_signal}SlurmdTimeout={o.slurmd_timeout}
EnforcePartLimits={o.enforce_part_limits}
ReturnToService=2
MessageTimeout=10
KillWait={o.kill_wait}
MinJobAge=600
FirstJobId={first_job}
{accounting}
NodeName=node[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port={node_ports} CPUs=8 {memory}
PartitionName=DEFAULT Nodes=ALL State=UP DefMemPerCPU=100
PartitionName=main Default=YES MaxTime={o.max_time} PriorityTier=10 PreemptMode=OFF
PartitionName=low MaxTime=INFINITE PriorityTier=1 PreemptMode={o.preempt_mode} GraceTime={o.grace_time}
"""

_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={lab}/munge.sock
AccountingStorageEnforce=associations
"""


def write_config(lab: Path, nodes: int, gpus: int, first_port: int, accounting: bool, options: Options) -> None:
    """Write slurm.conf and gres.conf to `lab`/etc.

    The controller listens on `first_port`, node N on `first_port` + N and slurmdbd on the next port.
    """
    folder = lab / "etc"
    text = _SLURM.format(
        lab=lab,
        o=options,
        controller=first_port,
        nodes=nodes,
        node_ports=f"[{first_port + 1}-{first_port + nodes}]" if nodes > 1 else first_port + 1,
        memory="RealMemory=64000" + (f" Gres=gpu:{gpus}" if gpus else ""),
        user_signal="SlurmctldParameters=preempt_send_user_signal\n" if options.preempt_send_user_signal else "",
        accounting=_ACCOUNTING.format(lab=lab, port=first_port + nodes + 1)
        if accounting
        else "AccountingStorageType=accounting_storage/none",
        # job ids from the clock: a fresh controller would reuse ids, and old results would be taken for new ones
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

    An abstract socket with the block's number is its lock: the kernel drops it when this process ends, however it ends.
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
