"""A loopback web server that misbehaves on purpose, one behaviour per page; its own thread, gone
with its block.
"""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

Behaviour = Callable[[asyncio.StreamWriter], Awaitable[object]]
KEEP = object()  # what a behaviour returns to keep its connection open
_START = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"


def raw(answer: bytes, outcome: object = None) -> Behaviour:
    """These bytes, and the end of the connection unless `outcome` is KEEP."""

    async def behave(writer: asyncio.StreamWriter) -> object:
        writer.write(answer)
        return outcome

    return behave


def kept(body: bytes) -> Behaviour:
    """A whole answer as plain text, after which the connection stays open."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
    return raw(head.encode() + body, KEEP)


def reply(body: bytes = b"", status: str = "200 OK", **headers: str) -> Behaviour:
    """A whole answer; header names are written with underscores."""
    fields = {"Content-Type": "text/html", "Content-Length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return raw(f"HTTP/1.1 {status}\r\n{head}Connection: close\r\n\r\n".encode() + body)


def redirect(location: str) -> Behaviour:
    return reply(status="302 Found", Location=location)


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """One behaviour per request; the last one from then on."""
    left = list(behaviours)

    async def behave(writer: asyncio.StreamWriter) -> object:
        return await (left.pop(0) if len(left) > 1 else left[0])(writer)

    return behave


async def silence(writer: asyncio.StreamWriter) -> None:
    """Hang before the first header."""
    await asyncio.sleep(3600)


def endless(piece: bytes, pause: float) -> Behaviour:
    """A body that never ends: pieces with a pause after each."""

    async def behave(writer: asyncio.StreamWriter) -> None:
        writer.write(_START + b"\r\n")
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    return behave


async def reset(writer: asyncio.StreamWriter) -> None:
    """Cut the connection in the middle of the headers."""
    writer.write(_START[:-9])
    await writer.drain()
    writer.transport.abort()


truncated = raw(_START + b"Content-Length: 1000\r\n\r\n<p>half")
cut_chunk = raw(_START + b"Transfer-Encoding: chunked\r\n\r\n400\r\n<p>half")


@dataclass
class Server:
    """A running server: where it is, and which `host/path` it was asked for, by which header lines,
    in order.
    """

    address: str = ""
    requested: list[str] = field(default_factory=list)
    heads: list[list[str]] = field(default_factory=list)
    connections: int = 0


@contextlib.contextmanager
def rude_server(pages: Mapping[str, Behaviour], tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """Serve behaviours by `host/path`; everything else is a 404."""
    server = Server()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            outcome = KEEP
            while outcome is KEEP:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                host = next(line.split(": ", 1)[1] for line in head if line.lower().startswith("host: "))
                name = host + head[0].split(" ")[1]
                server.requested.append(name)
                server.heads.append(head)
                outcome = await pages.get(name, reply(b"nothing here", status="404 Not Found"))(writer)
                await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def run(listener: socket.socket, stop: asyncio.Event) -> None:
        asked: list[asyncio.Task[None]] = []

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(asyncio.create_task(answer(reader, writer)))
            asked[-1].add_done_callback(lambda _: writer.transport.abort())

        listening = await asyncio.start_server(accept, sock=listener, ssl=tls)
        await stop.wait()
        listening.close()
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.01)  # the transports close in the loop's next rounds

    with (
        socket.create_server(("127.0.0.1", 0), backlog=256) as listener,
        asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner,
    ):
        server.address = "{}:{}".format(*listener.getsockname())
        loop, stop = runner.get_loop(), asyncio.Event()
        thread = threading.Thread(target=lambda: runner.run(run(listener, stop)))
        thread.start()
        try:
            yield server
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
