"""A loopback web server that misbehaves on purpose, one behaviour a page; its own thread, gone with its block."""

import asyncio
import contextlib
import gzip
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

Behaviour = Callable[[asyncio.StreamWriter], Awaitable[object]]
KEEP = object()  # what a behaviour returns to keep its connection open


def raw(answer: bytes) -> Behaviour:
    """These bytes, and the end of the connection."""

    async def behave(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    return behave


def kept(body: bytes) -> Behaviour:
    """A whole answer as plain text, after which the connection stays open."""

    async def behave(writer: asyncio.StreamWriter) -> object:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return KEEP

    return behave


def reply(body: bytes = b"", status: str = "200 OK", **headers: str) -> Behaviour:
    """A whole answer; header names are written with underscores."""
    fields = {"Content-Type": "text/html", "Content-Length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())

    async def behave(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\n{head}Connection: close\r\n\r\n".encode() + body)

    return behave


def redirect(location: str) -> Behaviour:
    return reply(status="302 Found", Location=location)


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """One behaviour a request; the last one from then on."""
    left = list(behaviours)

    async def behave(writer: asyncio.StreamWriter) -> object:
        return await (left.pop(0) if len(left) > 1 else left[0])(writer)

    return behave


async def silence(writer: asyncio.StreamWriter) -> None:
    """Hang before the first header."""
    await asyncio.sleep(3600)


async def drip(writer: asyncio.StreamWriter) -> None:
    """A byte now and then, without end: never silent, never done."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def endless(writer: asyncio.StreamWriter) -> None:
    """A body without end, as fast as it goes."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"<p>more</p>" * 1000)
        await writer.drain()


async def reset(writer: asyncio.StreamWriter) -> None:
    """Cut the connection in the middle of the headers."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-")
    await writer.drain()
    writer.transport.abort()


truncated = raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 1000\r\n\r\n<p>half")
cut_chunk = raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n400\r\n<p>half")
cut_between_chunks = raw(
    b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"
)
gibberish = raw(b"SSH-2.0-OpenSSH_9.2\r\n")  # not HTTP at all


def gzip_bomb(size: int) -> Behaviour:
    """A small body that unpacks to `size` bytes."""
    return reply(gzip.compress(bytes(size)), Content_Encoding="gzip")


@dataclass
class Server:
    """A running server: where it is, and which `host/path` it was asked for, by which header lines, in order."""

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
                if (first := await reader.readexactly(1)) == b"\x16":  # a TLS handshake, which ends here
                    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    break
                head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                path = head[0].split(" ")[1]
                host = next(line.split(": ", 1)[1] for line in head if line.lower().startswith("host: "))
                server.requested.append(host + path)
                server.heads.append(head)
                outcome = await pages.get(host + path, reply(b"nothing here", status="404 Not Found"))(writer)
                await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def run(listener: socket.socket, stop: asyncio.Event) -> None:
        asked: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(answer(reader, writer))
            asked.add(task)
            task.add_done_callback(lambda _: writer.transport.abort())

        listening = await asyncio.start_server(accept, sock=listener, ssl=tls)
        await stop.wait()
        listening.close()
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.01)  # the transports close in the loop's next rounds

    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        server.address = "{}:{}".format(*listener.getsockname())
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        loop, stop = runner.get_loop(), asyncio.Event()

        def work() -> None:
            with runner:
                runner.run(run(listener, stop))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield server
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
