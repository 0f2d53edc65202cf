"""A web server for measurements: in its own process on its own core, with 200 hosts and a latency of 5 ms.

The hosts are loopback addresses (127.0.1.1, 127.0.1.2, …; on Linux all of 127.0.0.0/8 is this machine), so that clients
open one connection per host, as on the web. `/page/N` returns page N modulo the number of bodies.
"""

import asyncio
import contextlib
import multiprocessing
import os
import resource
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

HOSTS = 200
LATENCY = 0.005  # seconds before the first byte of an answer


def addresses(count: int = HOSTS) -> list[str]:
    """The addresses of `count` hosts."""
    return [f"127.0.{1 + number // 250}.{1 + number % 250}" for number in range(count)]


def pin(core: int) -> None:
    """Pin this process to one core, if the system supports it and has several."""
    if hasattr(os, "sched_setaffinity") and len(cores := sorted(os.sched_getaffinity(0))) > 1:
        os.sched_setaffinity(0, {cores[core % len(cores)]})


class _Answers(asyncio.Protocol):
    """One kept-alive connection. It parses only the path, so that the server is never the bottleneck."""

    def __init__(self, bodies: Sequence[bytes]) -> None:
        self._bodies = bodies
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every complete request."""
        self._received += data
        *requests, self._received = self._received.split(b"\r\n\r\n")
        for request in requests:
            number = request.split(b" ", 2)[1].removeprefix(b"/page/")
            body = self._bodies[int(number) % len(self._bodies)] if number.isdigit() else b""
            asyncio.get_running_loop().call_later(LATENCY, self._answer, body)

    def _answer(self, body: bytes) -> None:
        status = b"200 OK" if body else b"404 Not Found"
        head = b"HTTP/1.1 %s\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: %d\r\n\r\n"
        if not self._transport.is_closing():
            self._transport.write(head % (status, len(body)) + body)


def _run(bodies: Sequence[bytes], parent: Connection) -> None:
    pin(0)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one open connection per host

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Answers(bodies), "0.0.0.0", 0, backlog=4096)
        parent.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(parent.poll, None)  # until the parent closes the pipe or ends

    asyncio.run(serve())


@contextlib.contextmanager
def web(bodies: Sequence[bytes]) -> Iterator[int]:
    """Serve `bodies` from another process; yields the port, which is the same on every host."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(bodies, theirs))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()
