"""Connects the ranks of a job: a shared store, and the connections of the failure monitor.

No port is ever guessed: rank 0 binds a free one and writes its address to a file in the model
folder, named after the job. `cluster.interface` names the interface (ib0, eth1). Without it,
processes on one node use loopback, and rank 0 of several nodes publishes its name in Slurm's node
list, or its host name.
"""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from common.errors import ConfigError, JobError, LostRankError
from common.files import write_text
from training.launch.failure_monitor import FailureMonitor, Hub
from training.launch.rank import Launch, node_name, starting

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

START_TIMEOUT = 300.0  # seconds for all ranks to join: slow nodes import torch from a cold network file system
_LOOPBACK = "127.0.0.1"


def rendezvous(launch: Launch, folder: Path, interface: str = "", timeout: float = START_TIMEOUT) -> "Store":
    """A store shared by all ranks of the job, served by rank 0 on a port chosen by the system.

    Rank 0 writes "host:port" to a file in `folder`, which is removed once all have joined. In the
    store, here/RANK is the name of that rank's node. Raises JobError after `timeout` seconds.
    """
    starting(launch.rank, "imports PyTorch")
    from torch.distributed import DistNetworkError, DistStoreError

    starting(launch.rank, f"waits for all {launch.world_size} processes")
    meeting = folder / f"meeting-{launch.key}"
    deadline = time.monotonic() + timeout
    store = None
    try:
        store = _serve(launch, meeting, interface, timeout) if launch.rank == 0 else _join(meeting, deadline)
        store.set(f"here/{launch.rank}", node_name())
        if launch.rank == 0:
            store.wait([f"here/{rank}" for rank in range(launch.world_size)], timedelta(seconds=timeout))
    except (DistStoreError, DistNetworkError, TimeoutError):
        missing = ""
        if store is not None and launch.rank == 0:
            absent = [str(rank) for rank in range(launch.world_size) if not store.check([f"here/{rank}"])]
            missing = f" for rank {', '.join(absent[:9])}{', …' if len(absent) > 9 else ''}"
        raise JobError(
            f"{meeting}: the {launch.world_size} processes of the job did not meet within {timeout:.0f} s "
            f"(rank {launch.rank} on {node_name()} waited{missing}); did they all start, and do they see the same "
            "folder?"
        ) from None
    finally:
        if launch.rank == 0:
            meeting.unlink(missing_ok=True)
    return store


def _serve(launch: Launch, meeting: Path, interface: str, timeout: float) -> "Store":
    """Rank 0: listen on a free port, then publish it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    own = listening_address(launch, interface)
    listener = socket.create_server((own, 0), backlog=launch.world_size)
    port = listener.getsockname()[1]
    store = TCPStore(
        own or _LOOPBACK,  # for rank 0's own connection
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),  # the store owns the socket now
    )
    write_text(meeting, f"{published_host(launch, interface)}:{port}\n")
    return store


def _join(meeting: Path, deadline: float) -> "Store":
    """Ranks 1 and up: read the address until it answers; a killed start's refuses connections."""
    from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

    while time.monotonic() < deadline:
        try:
            host, _, port = meeting.read_text(encoding="utf-8").strip().rpartition(":")
            attempt = timedelta(seconds=2)  # how long to try an address that may be stale
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=attempt)
            store.set_timeout(timedelta(seconds=START_TIMEOUT))
            return store
        except (FileNotFoundError, DistNetworkError):
            time.sleep(0.05)
    raise TimeoutError


def start_monitor(launch: Launch, store: "Store", interface: str = "") -> FailureMonitor:
    """Connect to the hub, which rank 0 starts; its address is in the store."""
    if launch.rank == 0:
        own = listening_address(launch, interface)
        hub = Hub(own, launch.world_size)
        store.set("hub", f"{published_host(launch, interface)} {hub.port}")
        return FailureMonitor(0, own or _LOOPBACK, hub.port, hub)
    from torch.distributed import DistNetworkError, DistStoreError

    host = "?"
    try:
        host, port = store.get("hub").decode().split()
        monitor = FailureMonitor(launch.rank, host, int(port))
    except (OSError, DistNetworkError, DistStoreError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise LostRankError(f"rank {launch.rank}: no connection to rank 0 on {host} ({reason})") from None
    if launch.rank == launch.world_size - 1:
        store.set("rank 0's address", monitor.hub_address)
    return monitor


# ------------------------------------------------------------------- addresses and interfaces


def _addresses() -> list[tuple[str, str]]:
    """(interface, IPv4 address) of this node."""
    entries = ((name, entry) for name, entries in psutil.net_if_addrs().items() for entry in entries)
    return [(name, entry.address) for name, entry in entries if entry.family == socket.AF_INET]


def _address_of(interface: str) -> str:
    """The IPv4 address of an interface of this node; empty if there is none."""
    return next((address for name, address in _addresses() if name == interface), "")


def published_host(launch: Launch, interface: str) -> str:
    """The name or address by which the other ranks reach this one (rank 0).

    A name rather than its own address, which Debian says is 127.0.1.1.
    """
    if address := _address_of(interface):
        return address
    if launch.nodes == 1:
        return _LOOPBACK
    if launch.launcher == "slurm" and _resolve(node_name()):  # a cluster may have names that only Slurm knows
        return node_name()
    return socket.gethostname()


def listening_address(launch: Launch, interface: str) -> str:
    """The address that rank 0 binds its ports to; empty for all of them."""
    return _address_of(interface) or (_LOOPBACK if launch.nodes == 1 else "")


def _resolve(name: str) -> str:
    """The IPv4 address of a host; empty if its name is unknown."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def set_interface(launch: Launch, interface: str, store: "Store", monitor: FailureMonitor) -> None:
    """Set the interface of gloo and NCCL, before the process group is made.

    gloo takes the address of the host's name. If that is loopback although there are several nodes,
    it gets the interface by which this rank reaches the others; NCCL avoids loopback by itself.
    Raises ConfigError if this node lacks `interface`.
    """
    if interface:
        if not _address_of(interface):
            existing = ", ".join(f"{name} ({address})" for name, address in _addresses())
            raise ConfigError(
                f"cluster.interface: {node_name()} has no {interface!r} with an IPv4 address, only {existing}"
            )
        os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"] = interface, f"={interface}"  # =: no prefix
    elif launch.nodes == 1:
        if "lo" in (name for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a laptop's host name often does not resolve
    elif (_resolve(socket.gethostname()) or _LOOPBACK).startswith("127."):
        own = store.get("rank 0's address").decode() if launch.rank == 0 else monitor.own_address
        names = [name for name, address in _addresses() if address == own]
        if names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
