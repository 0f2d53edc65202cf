"""Notifies all ranks of a job when one of them fails, so that they exit instead of waiting for it.

Without this, they wait in a collective call until the process group's time-out. Each rank holds a
connection to a hub, a thread of rank 0. A rank that fails sends the reason; a connection that
closes without a message means that the process died. The hub sends the first failure to all ranks,
which exit with its exit code; one that hangs in a library some seconds later calls os._exit.

A connection carries lines. To the hub: the rank, then {"rank": 3, "message": "…", "code": 2}, or {}
at the end of the job. From the hub: the first failure, or {} when rank 0 has finished.
"""

import asyncio
import json
import os
import socket
import sys
import threading
from contextlib import suppress
from typing import NamedTuple

from common.errors import RESUME_ME, USER_ERROR
from training.launch.signals import ignore_signals

_GRACE = 4.0  # seconds to be notified, and then to exit
_CLEAN_UP = 60.0  # seconds for a failed rank to close its files and libraries
_CONNECT = 30.0  # seconds to connect to the hub
_RANK_0_FIRST = 0.5  # seconds that other ranks wait before they report a failure
_FINISHED = b"{}\n"


class Failure(NamedTuple):
    """The failure of one rank, which ends the job."""

    rank: int
    message: str
    code: int = USER_ERROR

    @classmethod
    def died(cls, rank: int) -> "Failure":
        """The failure of a rank whose connection closed."""
        return cls(rank, "it ended without a message (killed, or out of memory?); its own log may say why", RESUME_ME)

    def seen_by(self, rank: int) -> str:
        """The message that another rank exits with."""
        resume = "; rerun to resume" if self.code == RESUME_ME else ""
        return f"rank {rank} exits because rank {self.rank} failed: {self.message}{resume}"

    def line(self) -> bytes:
        """The failure as it is sent."""
        return json.dumps(self._asdict()).encode() + b"\n"


class Hub:
    """Rank 0's end of all connections, served by a thread on a port chosen by the system."""

    def __init__(self, host: str, world_size: int) -> None:
        self._world_size = world_size
        self._listener = socket.create_server((host, 0), backlog=world_size)
        self.port: int = self._listener.getsockname()[1]
        self.all_notified = threading.Event()
        self._connections: list[asyncio.StreamWriter] = []
        self._notified = 0  # the number of connections that have got the answer
        self._answer = b""  # what all ranks get: the first failure, or _FINISHED
        threading.Thread(target=lambda: asyncio.run(self._serve()), name="hub", daemon=True).start()

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._serve_rank, sock=self._listener, backlog=self._world_size):
            await asyncio.Event().wait()  # for the end of the process: to close earlier could discard what was sent

    async def _serve_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            rank = int(await reader.readline())
        except (OSError, ValueError):  # not one of our processes: a port scanner
            writer.close()
            return
        self._connections.append(writer)
        line = self._answer
        with suppress(OSError):  # reset: the process was killed
            line = line or await reader.readline()
        if not self._answer and (line != _FINISHED or rank == 0):
            self._answer = line or Failure.died(rank).line()
        while self._answer and self._notified < len(self._connections):
            self._connections[self._notified].write(self._answer)
            self._notified += 1
        if self._notified == self._world_size:
            self.all_notified.set()


class FailureMonitor:
    """One rank's connection to the hub.

    with FailureMonitor(rank, host, port) as monitor:
        …                   # after an error, monitor.fail(failure) returns what ends the job

    Rank 0 passes the `hub`, which ends with its process, and exits after all ranks are notified.
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
        self._send(f"{rank}\n".encode())
        threading.Thread(target=self._listen, name="failure monitor", daemon=True).start()

    def __enter__(self) -> "FailureMonitor":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._leaving.set()
        if kind is None:
            self._send(_FINISHED)
        else:  # the clean-up may hang in a library that waits for other processes
            timer = threading.Timer(_CLEAN_UP, os._exit, [self._decided.code if self._decided else USER_ERROR])
            timer.daemon = True
            timer.start()
        if self._hub is not None:
            self._hub.all_notified.wait(_GRACE)

    def _send(self, line: bytes) -> None:
        with suppress(OSError):  # rank 0 has exited already
            self._socket.sendall(line)

    def _listen(self) -> None:
        """Wait for the hub's one message, in a thread; end this process if it does not exit."""
        line = b""
        with self._socket, suppress(OSError), self._socket.makefile("rb") as lines:
            line = lines.readline()
        if line != _FINISHED:
            self._decided = Failure(**json.loads(line)) if line else Failure.died(0)
            ignore_signals()
        self._notified.set()
        if self._decided and not self._leaving.wait(_GRACE):
            sys.stdout.flush()
            print(f"error: {self._decided.seen_by(self.rank)}", file=sys.stderr, flush=True)
            os._exit(self._decided.code)

    def fail(self, failure: Failure) -> Failure:
        """Report to the hub why this rank ends; returns the failure that ends the job.

        Other ranks wait for rank 0 first: an error that all ranks share is printed once, by rank 0.
        """
        self._leaving.set()
        if self.rank == 0 or not self._notified.wait(_RANK_0_FIRST):
            self._send(failure.line())
        return self.wait() or failure

    def wait(self) -> Failure | None:
        """Wait for the failure that ends the job; None if there is none."""
        self._leaving.set()
        self._notified.wait(_GRACE)
        return self._decided
