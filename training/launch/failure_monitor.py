"""Tells all ranks of a job at once when one of them fails, so that they exit instead of waiting for it.

Without this, they wait in a collective call until the process group's time-out. Each rank holds a connection to a hub,
a thread of rank 0. A rank that fails says why; a connection that closes without a message means that the process died.
The hub decides which failure ends the job and sends it to all: each rank exits with its exit code. A rank that is still
stuck in a library some seconds later is ended hard: it has nothing to save.

The messages are lines of JSON. To the hub: {"rank": 3}, then {"message": "…", "code": 2}, or {} at the end of the job.
From the hub: {"message": "…", "code": 2, "ranks": [3]}, or {} when rank 0 has finished.
"""

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from common.errors import LOCK_LOST, RESUME_ME, USER_ERROR
from training.launch.signals import ignore_signals

_COLLECT = 2.0  # seconds after the first failure to wait for others with the same cause
_GRACE = 4.0  # seconds a rank gets to exit by itself after it has been notified
_LEAVING = 60.0  # seconds a failed rank gets to close its files and libraries
_CONNECT = 30.0  # seconds to connect to the hub
_SEVERITY = (USER_ERROR, LOCK_LOST, RESUME_ME)


class Failure(NamedTuple):
    """Why a rank ends, or all of them do."""

    message: str
    code: int = USER_ERROR
    ranks: tuple[int, ...] = ()
    """Those that have failed like this, in the hub's decision."""

    def seen_by(self, rank: int) -> str:
        """The message of a rank that exits because of it."""
        more = f" (and {len(self.ranks) - 1} more)" if len(self.ranks) > 1 else ""
        text = f"rank {rank} leaves because rank {self.ranks[0]}{more} failed: {self.message}"
        return f"{text}; started again, the job continues" if self.code == RESUME_ME else text


DIED = Failure("it ended without a message (killed, or out of memory?); its own log may say why", RESUME_ME)


def _line(failure: Failure | None) -> bytes:
    return json.dumps(failure._asdict() if failure else {}).encode() + b"\n"


def _read(line: bytes) -> Failure | None:
    fields = json.loads(line)
    return Failure(**{**fields, "ranks": tuple(fields["ranks"])}) if fields else None


class Hub:
    """Rank 0's end of all connections, served by a thread on a port chosen by the system."""

    def __init__(self, host: str, world_size: int) -> None:
        self._world_size = world_size
        self._listener = socket.create_server((host, 0), backlog=world_size)
        self.port: int = self._listener.getsockname()[1]
        self.all_notified = threading.Event()
        self._connections: list[asyncio.StreamWriter] = []
        self._failures: dict[int, Failure] = {}  # in the order of their arrival
        self._over = False
        threading.Thread(target=lambda: asyncio.run(self._serve()), name="hub", daemon=True).start()

    async def _serve(self) -> None:
        self._news = asyncio.Condition()
        async with await asyncio.start_server(self._hear, sock=self._listener, backlog=self._world_size):
            await self._until(lambda: bool(self._failures) or self._over)
            if self._failures:
                await self._until(lambda: len(self._connections) == self._world_size, _CONNECT)
                await self._until(lambda: len(self._failures) == self._world_size, _COLLECT)
            for connection in self._connections:
                connection.write(_line(self._decision()))
            await asyncio.gather(*(each.drain() for each in self._connections), return_exceptions=True)
            self.all_notified.set()
            await asyncio.Event().wait()  # for the end of the process: to close now could discard what was sent

    async def _until(self, condition: Callable[[], bool], timeout: float | None = None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._news:
                await self._news.wait_for(condition)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        rank = -1
        try:
            rank = int(json.loads(await reader.readline())["rank"])
            async with self._news:
                self._connections.append(writer)
                self._news.notify_all()
            failure = _read(await reader.readline())
        except (OSError, ValueError, TypeError, KeyError):
            failure = DIED
        if rank < 0:  # not one of our processes: a port scanner
            writer.close()
            return
        async with self._news:
            if failure:
                self._failures[rank] = failure
            self._over = self._over or (rank == 0 and not failure)
            self._news.notify_all()

    def _decision(self) -> Failure | None:
        """Of the failures that a person must cure, or else a lost lock, or else a death, the one that came first."""
        if not self._failures:
            return None
        first = min(self._failures.values(), key=lambda failure: _SEVERITY.index(failure.code))
        return first._replace(ranks=tuple(sorted(rank for rank, other in self._failures.items() if other == first)))


class FailureMonitor:
    """One rank's connection to the hub.

    with FailureMonitor(rank, host, port) as monitor:
        …                       # after an error: monitor.fail(failure) returns the one that ends the job

    Rank 0 gives the `hub`, which ends with its process, and leaves when all have been notified.
    """

    def __init__(self, rank: int, host: str, port: int, hub: Hub | None = None) -> None:
        self.rank = rank
        self._hub = hub
        self._decided: Failure | None = None
        self._notified, self._leaving = threading.Event(), threading.Event()
        self._socket = socket.create_connection((host, port), _CONNECT)
        self._socket.settimeout(None)
        self.own_address: str = self._socket.getsockname()[0]
        self.hub_address: str = self._socket.getpeername()[0]
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, option):  # a node without power is detected after 90 seconds
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        self._send(json.dumps({"rank": rank}).encode() + b"\n")
        threading.Thread(target=self._listen, name="failure monitor", daemon=True).start()

    def __enter__(self) -> "FailureMonitor":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._leaving.set()
        if kind is None:
            self._send(_line(None))
        else:  # the clean-up may hang in a library that waits for other processes
            timer = threading.Timer(_LEAVING, os._exit, [self._decided.code if self._decided else USER_ERROR])
            timer.daemon = True
            timer.start()
        if self._hub is not None:
            self._hub.all_notified.wait(_GRACE)

    def _send(self, line: bytes) -> None:
        with suppress(OSError):  # rank 0 has exited already
            self._socket.sendall(line)

    def _listen(self) -> None:
        """The thread: wait for the hub's single message, and end this process if it does not exit by itself."""
        line = b""
        with self._socket, suppress(OSError), self._socket.makefile("rb") as lines:
            line = lines.readline()
        self._decided = _read(line) if line else DIED._replace(ranks=(0,))
        if self._decided is None:
            return
        ignore_signals()
        self._notified.set()
        if not self._leaving.wait(_GRACE):
            sys.stdout.flush()
            print(f"error: {self._decided.seen_by(self.rank)}", file=sys.stderr, flush=True)
            os._exit(self._decided.code)

    def report(self, failure: Failure) -> None:
        """Tell the hub why this rank ends."""
        self._leaving.set()
        self._send(_line(failure))

    def fail(self, failure: Failure) -> Failure:
        """Tell the hub why this rank ends; returns the failure that ends the job."""
        self.report(failure)
        return self.wait(_CONNECT + _GRACE) or failure._replace(ranks=(self.rank,))

    def wait(self, timeout: float = _COLLECT + _GRACE) -> Failure | None:
        """Wait for the failure of another rank; None if there is none."""
        self._leaving.set()
        self._notified.wait(timeout)
        return self._decided
