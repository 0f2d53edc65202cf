"""Lets the processes of a job find each other: a shared store, and the lifelines that report failures.

No port is ever guessed. Rank 0 binds a free one and writes its address to a file in the model folder, whose name
contains the job id and restart count; torchrun provides its own store.
"""

import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import JobError
from common.files import write_text
from training.parallel.launch import Launch
from training.parallel.lifeline import Hub, Lifeline

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

START_TIMEOUT = 300.0  # seconds for all processes to meet: slow nodes import torch from a cold network file system


def meet(launch: Launch, folder: Path, timeout: float = START_TIMEOUT) -> "Store":
    """Returns a store shared by all processes of the job, served by rank 0 on a port chosen by the system.

    Rank 0 writes "host:port" to a file in `folder` and the others wait for it; once all have joined, the file is
    removed.
    """
    from torch.distributed import DistNetworkError, DistStoreError

    if launch.launcher == "torchrun":
        return _torchrun_store(timeout)
    meeting = folder / f"meeting-{launch.key}"
    deadline = time.monotonic() + timeout
    try:
        store = _serve(launch, meeting, timeout) if launch.rank == 0 else _join(launch, meeting, deadline)
        store.set(f"here/{launch.rank}", "yes")
        if launch.rank == 0:
            store.wait([f"here/{rank}" for rank in range(launch.world_size)], timedelta(seconds=timeout))
    except (DistStoreError, DistNetworkError, TimeoutError):
        raise JobError(
            f"{meeting}: the {launch.world_size} processes of the job did not meet within {timeout:.0f} s "
            f"(rank {launch.rank} waited); did they all start, and do they see the same folder?"
        ) from None
    finally:
        if launch.rank == 0:
            meeting.unlink(missing_ok=True)
    return store


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


def _serve(launch: Launch, meeting: Path, timeout: float) -> "Store":
    """Rank 0: listen on a free port, then publish it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    one_node = launch.nodes == 1
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1" if one_node else "", 0))
    listener.listen(launch.world_size)
    port = listener.getsockname()[1]
    # The host's name, not its address as seen from itself: Debian resolves a machine's own name to 127.0.1.1.
    host = "127.0.0.1" if one_node else socket.gethostname()
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),  # the store owns the socket now
    )
    write_text(meeting, f"{host}:{port}\n")
    return store


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


def join_lifeline(launch: Launch, store: "Store") -> Lifeline:
    """Connect to the hub, which rank 0 starts; the store passes its address on."""
    if launch.rank == 0:
        host = "127.0.0.1" if launch.nodes == 1 else ""
        hub = Hub(host, launch.world_size)
        store.set("hub", f"{host or socket.gethostname()} {hub.port}")
        return Lifeline(0, "127.0.0.1", hub.port)
    host, port = store.get("hub").decode().split()
    try:
        return Lifeline(launch.rank, host, int(port))
    except OSError as error:
        raise JobError(f"rank {launch.rank}: no connection to rank 0 on {host} ({error.strerror or error})") from None
