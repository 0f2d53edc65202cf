"""Lets the processes of a job find each other: a shared store, and the lifelines that report failures.

No port is ever guessed. Rank 0 binds a free one and writes its address to a file in the model folder, whose name
contains the job id and restart count; torchrun provides its own store. Which address: `training.parallel.network`.
"""

import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import JobError, LostRankError
from common.files import write_text
from training.parallel.launch import Launch, node_name
from training.parallel.lifeline import Hub, Lifeline
from training.parallel.network import LOOPBACK, listening_address, published_host

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

START_TIMEOUT = 300.0  # seconds for all processes to meet: slow nodes import torch from a cold network file system


def meet(launch: Launch, folder: Path, interface: str = "", timeout: float = START_TIMEOUT) -> "Store":
    """Returns a store shared by all processes of the job, served by rank 0 on a port chosen by the system.

    Rank 0 writes "host:port" to a file in `folder` and the others wait for it; once all have joined, the file is
    removed. In the store, here/RANK is the name of that rank's node. Raises JobError after `timeout` seconds.
    """
    from torch.distributed import DistNetworkError, DistStoreError

    meeting = folder / f"meeting-{launch.key}"
    deadline = time.monotonic() + timeout
    store = None
    try:
        if launch.launcher == "torchrun":
            store = _torchrun_store(timeout)
        elif launch.rank == 0:
            store = _serve(launch, meeting, interface, timeout)
        else:
            store = _join(launch, meeting, deadline)
        store.set(f"here/{launch.rank}", node_name())
        if launch.rank == 0:
            store.wait([f"here/{rank}" for rank in range(launch.world_size)], timedelta(seconds=timeout))
    except (DistStoreError, DistNetworkError, TimeoutError):
        raise JobError(
            f"{meeting}: the {launch.world_size} processes of the job did not meet within {timeout:.0f} s "
            f"(rank {launch.rank} on {node_name()} waited{_missing(launch, store)}); did they all start, and do they "
            "see the same folder?"
        ) from None
    finally:
        if launch.rank == 0:
            meeting.unlink(missing_ok=True)
    return store


def _missing(launch: Launch, store: "Store | None") -> str:
    """Which processes have not come, as far as rank 0 knows."""
    if store is None or launch.rank != 0:
        return ""
    absent = [rank for rank in range(launch.world_size) if not store.check([f"here/{rank}"])]
    return f" for rank {', '.join(map(str, absent[:9]))}{', …' if len(absent) > 9 else ''}"


def _torchrun_store(timeout: float) -> "Store":
    """The store that torchrun provides; a new one after each restart of the workers."""
    from torch.distributed import DistNetworkError, DistStoreError, PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    except (DistStoreError, DistNetworkError, TimeoutError) as error:
        raise JobError(f"MASTER_ADDR, MASTER_PORT: {str(error).splitlines()[0]}") from None
    prefixed: Store = PrefixStore("training", store)
    return prefixed


def _serve(launch: Launch, meeting: Path, interface: str, timeout: float) -> "Store":
    """Rank 0: listen on a free port, then publish it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    own = listening_address(launch, interface)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((own, 0))
    listener.listen(launch.world_size)
    port = listener.getsockname()[1]
    store = TCPStore(
        own or LOOPBACK,  # for rank 0's own connection
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),  # the store owns the socket now
    )
    remove_stale(meeting.parent, "meeting-*")
    write_text(meeting, f"{published_host(launch, interface)}:{port}\n")
    return store


def remove_stale(folder: Path, pattern: str) -> None:
    """Remove the files of starts that were killed: those older than any start takes."""
    for path in folder.glob(pattern):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > 2 * START_TIMEOUT:
                path.unlink()


def _join(launch: Launch, meeting: Path, deadline: float) -> "Store":
    """Ranks 1 and up: wait for the address. One left behind by a killed start refuses connections and is read again."""
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


def join_lifeline(launch: Launch, store: "Store", interface: str = "") -> Lifeline:
    """Connect to the hub, which rank 0 starts; the store passes its address on."""
    if launch.rank == 0:
        own = listening_address(launch, interface)
        hub = Hub(own, launch.world_size)
        store.set("hub", f"{published_host(launch, interface)} {hub.port}")
        return Lifeline(0, own or LOOPBACK, hub.port, hub)
    from torch.distributed import DistNetworkError, DistStoreError

    host = "?"
    try:
        host, port = store.get("hub").decode().split()
        lifeline = Lifeline(launch.rank, host, int(port))
    except (OSError, DistNetworkError, DistStoreError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise LostRankError(f"rank {launch.rank}: no connection to rank 0 on {host} ({reason})") from None
    if launch.rank == launch.world_size - 1:
        store.set("rank 0's address", lifeline.hub_address)
    return lifeline


def own_address(launch: Launch, store: "Store", lifeline: Lifeline) -> str:
    """The address of this process on its way to the others; for rank 0, the one that the last rank connected to."""
    return store.get("rank 0's address").decode() if launch.rank == 0 else lifeline.own_address
