"""Tells all processes of a job at once when one of them fails, so that they exit instead of waiting for it.

Without this, they wait in a collective call until the process group's time-out. Each process holds a connection to a
hub, a thread of rank 0. A process that fails sends its message there; a connection that closes without a message means
that the process died. The hub sends the collected messages to all. A process that is still stuck in a library some
seconds later is ended hard: it has nothing to save.

The messages are lines of JSON. To the hub: {"rank": 3}, then {"failed": ["…", 2]} (message and exit code) or
{"bye": true}. From the hub: {"failed": {"3": ["…", 2]}}, or {"bye": true} when rank 0 has finished.
"""

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from training.leaving import RESUME_ME, TAKEN_OVER, TO_CURE, disarm

_COLLECT = 2.0  # seconds after the first failure to wait for others with the same cause
_GRACE = 4.0  # seconds a process gets to exit by itself after it has been told of a failure
_LEAVING = 60.0  # seconds a failed process gets to close its files and libraries
_CONNECT = 30.0  # seconds to connect to the hub


class Failure(NamedTuple):
    """Why a process ends, and its exit code."""

    message: str
    code: int = TO_CURE


DIED = Failure("it ended without a message (killed, or out of memory?); its own log may say why", RESUME_ME)


def _send(connection: socket.socket, **message: Any) -> None:
    """Send one line. A closed connection is ignored: that process has exited already."""
    with suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


class Hub:
    """Rank 0's end of all lifelines, served by a thread on a port chosen by the system."""

    def __init__(self, host: str, world_size: int) -> None:
        self._world_size = world_size
        self._listener = socket.create_server((host, 0), backlog=world_size)
        self.port: int = self._listener.getsockname()[1]
        self.told = threading.Event()
        """All have been sent how the job ends."""
        self._ranks: dict[socket.socket, int] = {}
        self._partial: dict[socket.socket, bytes] = {}  # the beginning of a line that has not arrived completely
        self._connected = 0  # ranks that have connected so far
        self._failed: dict[int, Failure] = {}
        self._over = False
        threading.Thread(target=self._serve, name="hub", daemon=True).start()

    def _serve(self) -> None:
        first = 0.0  # when the first failure arrived
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._over:
                left = 0.1 if first else None
                for key, _ in selector.select(left):
                    if key.fileobj is self._listener:
                        with suppress(OSError):  # the process has exited already
                            connection = self._listener.accept()[0]
                            self._partial[connection] = b""
                            selector.register(connection, selectors.EVENT_READ)
                    elif isinstance(key.fileobj, socket.socket) and not self._read(key.fileobj):
                        selector.unregister(key.fileobj)
                        key.fileobj.close()
                first = first or (time.monotonic() if self._failed else 0.0)
                waited = time.monotonic() - first if first else 0.0
                complete = self._connected == self._world_size or waited >= _CONNECT  # some may not have connected yet
                if first and (len(self._failed) == self._world_size or (complete and waited >= _COLLECT)):
                    break
        for connection in self._partial:
            _send(connection, **({"failed": self._failed} if self._failed else {"bye": True}))
        self.told.set()
        for connection in self._partial:  # closing with unread data would discard what was sent
            with connection, suppress(OSError):
                while connection.recv(1 << 16):
                    pass

    def _read(self, connection: socket.socket) -> bool:
        """Read what has arrived; False if the connection is closed."""
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self._partial[connection] = (self._partial[connection] + data).split(b"\n")
        try:
            for line in lines:
                self._hear(connection, json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError):
            data = b""  # not one of our processes: a port scanner
        if data and connection in self._partial:
            return True
        self._partial.pop(connection, None)
        if connection in self._ranks:
            self._failed.setdefault(self._ranks[connection], DIED)
        return False

    def _hear(self, connection: socket.socket, message: Mapping[str, Any]) -> None:
        if "rank" in message:
            self._ranks[connection] = message["rank"]
            self._connected += 1
        rank = self._ranks[connection]
        if "failed" in message:
            self._failed[rank] = Failure(*message["failed"])
        if "bye" in message:
            self._over = self._over or rank == 0
            del self._ranks[connection], self._partial[connection]


class Lifeline:
    """One process's connection to the hub.

    with Lifeline(rank, host, port) as lifeline:
        …                       # after an error: lifeline.fail(message) returns which ranks have failed

    Rank 0 gives the `hub`, which ends with its process, and leaves when all have been told.
    """

    def __init__(self, rank: int, host: str, port: int, hub: Hub | None = None) -> None:
        self.rank = rank
        self._hub = hub
        self.failed: dict[int, Failure] = {}
        """Failures by rank, once the hub has sent them."""
        self._own: Failure | None = None
        self._heard, self._leaving = threading.Event(), threading.Event()
        self._over = False
        self._socket = socket.create_connection((host, port), _CONNECT)
        self._socket.settimeout(None)
        self.own_address: str = self._socket.getsockname()[0]
        self.hub_address: str = self._socket.getpeername()[0]
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, option):  # a node without power is detected after 90 seconds
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        _send(self._socket, rank=rank)
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    def __enter__(self) -> "Lifeline":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._leaving.set()
        if kind is None:
            self._over = True
            _send(self._socket, bye=True)
        else:  # the clean-up may hang in a library that waits for other processes
            code = self._own.code if self._own else self.exit_code()
            timer = threading.Timer(_LEAVING, os._exit, [code])
            timer.daemon = True
            timer.start()
        if self._hub is not None:
            self._hub.told.wait(_GRACE)

    def _listen(self) -> None:
        """The thread: wait for the hub's single message, and end this process if it does not exit by itself."""
        line = b""
        with self._socket, suppress(OSError), self._socket.makefile("rb") as lines:
            line = lines.readline()
        message = json.loads(line) if line else {"failed": {"0": DIED}}
        if "failed" not in message or self._over:
            return
        self.failed = {int(rank): Failure(*failure) for rank, failure in message["failed"].items()}
        disarm()
        self._heard.set()
        if not self._leaving.wait(_GRACE):
            sys.stdout.flush()
            print(f"error: {self.describe_failure()}", file=sys.stderr, flush=True)
            os._exit(self.exit_code())

    def fail(self, failure: Failure, wait: bool = True) -> dict[int, Failure]:
        """Tell the others why this process ends; returns the failures of all ranks, including this one."""
        self._own = failure
        self._leaving.set()
        _send(self._socket, failed=failure)
        if wait:
            self._heard.wait(_CONNECT + _GRACE)
        return {self.rank: failure, **self.failed}

    def wait_for_failure(self) -> bool:
        """Wait some seconds for the cause of a lost connection; returns whether another process failed."""
        self._leaving.set()
        return self._heard.wait(_COLLECT + _GRACE)

    def exit_code(self) -> int:
        """The exit code of a healthy process that exits because others failed.

        RESUME_ME if they only died or lost contact; an error that a person has to cure outweighs everything else.
        """
        codes = {failure.code for failure in self.failed.values()}
        if codes <= {RESUME_ME, TAKEN_OVER}:
            return TAKEN_OVER if TAKEN_OVER in codes else RESUME_ME
        return TO_CURE

    def describe_failure(self) -> str:
        """The message of a healthy process that exits because others failed: the first rank with that exit code."""
        code = self.exit_code()
        first = min((rank for rank, failure in self.failed.items() if failure.code == code), default=min(self.failed))
        more = f" (and {len(self.failed) - 1} more)" if len(self.failed) > 1 else ""
        text = f"rank {self.rank} leaves because rank {first}{more} failed: {self.failed[first].message}"
        return f"{text}; started again, the job continues" if code == RESUME_ME else text
