"""Extraction in worker processes: a page that hangs, crashes or leaks costs its process and itself, nothing else.

`corpus.extract.worker` is the other end of the socket, and documents the protocol. pebble's ProcessPool takes the same
CPU time per page (2 ms), but it has no memory limit, and its hung workers outlive a killed parent.
"""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from common.errors import PageError, ToolkitError
from common.settings import ScrapeSettings
from corpus.extract.extractors import Extracted
from corpus.extract.worker import LENGTH, SIGNAL_EXIT

PAGES_PER_CHILD = 500  # then it is replaced: lxml and the libraries above it leak
_KILL_GRACE = 1.0  # seconds; when a job's processes are killed one by one, a page must not be blamed for its worker
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class _Request:
    """A page to extract, and the future of its reply."""

    content: tuple[bytes, str, str]
    """Body, content type, URL."""
    reply: "asyncio.Future[dict[str, Any]]"

    def succeed(self, reply: dict[str, Any]) -> None:
        """Set the reply, unless the caller was cancelled."""
        if not self.reply.done():
            self.reply.set_result(reply)

    def fail(self, error: Exception) -> None:
        """Set an error, unless the caller was cancelled."""
        if not self.reply.done():
            self.reply.set_exception(error)


class ExtractPool:
    """Runs up to `workers` processes, started on demand."""

    def __init__(self, settings: ScrapeSettings, workers: int) -> None:
        self._settings, self._workers = settings, workers
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()

    async def __aenter__(self) -> "ExtractPool":
        self._tasks = [asyncio.create_task(self._work()) for _ in range(self._workers)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def extract(self, body: bytes, content_type: str, url: str) -> Extracted:
        """Extract the text of a page. Raises PageError with the reason (`extract_timeout`, `extract_memory`, …)."""
        request = _Request((body, content_type, url), asyncio.get_running_loop().create_future())
        self._requests.put_nowait(request)
        reply = await request.reply
        if "reason" in reply:
            raise PageError(reply["reason"])
        return Extracted(**reply)

    async def _work(self) -> None:
        """Feed one process, and start another when it dies."""
        while True:
            request = await self._requests.get()
            try:
                worker = await _Worker.start(self._settings)
            except Exception as error:  # the caller of `extract` decides
                request.fail(error)
                continue
            try:
                await self._feed(worker, request)
            finally:
                await worker.stop()

    async def _feed(self, worker: "_Worker", request: _Request) -> None:
        """Send requests until one kills the worker; the one after it returns to the queue.

        The next request is sent while the worker is busy, so the worker never waits for the event loop.
        """
        sending, following = asyncio.create_task(worker.send(request)), None
        try:
            while True:
                await sending
                following = None if self._requests.empty() else self._requests.get_nowait()
                if following is not None:
                    sending = asyncio.create_task(worker.send(following))
                request.succeed(await worker.receive())
                if following is None:
                    following = await self._requests.get()
                    sending = asyncio.create_task(worker.send(following))
                request = following
        except Exception as error:
            request.fail(error)
            if following is not None and following is not request:
                self._requests.put_nowait(following)
        finally:
            sending.cancel()
            await asyncio.wait([sending])  # it must not use a closed socket


class _Worker:
    """The pool's end of one worker process."""

    def __init__(self, process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
        self._process, self._connection = process, connection

    @classmethod
    async def start(cls, settings: ScrapeSettings) -> "_Worker":
        """Start a process and wait until it has loaded its libraries."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])}
        numbers = (PAGES_PER_CHILD, settings.extract_timeout, settings.extract_memory_mb)
        command = [sys.executable, "-m", "corpus.extract.worker", *map(str, numbers), *settings.extractors]
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            # Not an asyncio subprocess: if its start is cancelled, waiting for its exit may hang (Python 3.11).
            # A process group, so that `stop` kills the child too, and Ctrl-C only reaches the parent.
            process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment, process_group=0)
        worker = cls(process, ours)
        try:
            await worker._read_frame()
        except EOFError:
            await worker.stop()
            load = f"from corpus.extract.extractors import load_extractors as load; load({list(settings.extractors)})"
            raise ToolkitError(f'an extraction worker did not start; try {sys.executable} -c "{load}"') from None
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def send(self, request: _Request) -> None:
        """Write a request to the socket. If the process is gone, `receive` notices."""
        frame = pickle.dumps(request.content)
        with suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(self._connection, LENGTH.pack(len(frame)) + frame)

    async def receive(self) -> dict[str, Any]:
        """The reply to the oldest request. Raises PageError if the process died."""
        try:
            reply: dict[str, Any] = orjson.loads(await self._read_frame())
        except (EOFError, ConnectionError):
            code = await asyncio.to_thread(self._process.wait)
            if code in (-signal.SIGKILL, SIGNAL_EXIT + signal.SIGKILL):
                await asyncio.sleep(_KILL_GRACE)
            raise PageError("extract_timeout" if code == SIGNAL_EXIT + signal.SIGALRM else "extract_crash") from None
        return reply

    async def _read_frame(self) -> bytearray:
        """The next frame. Raises EOFError if the process is gone."""
        (length,) = LENGTH.unpack(await self._read(LENGTH.size))
        return await self._read(length)

    async def _read(self, size: int) -> bytearray:
        received = bytearray(size)
        rest = memoryview(received)
        while rest:
            count = await asyncio.get_running_loop().sock_recv_into(self._connection, rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return received

    async def stop(self) -> None:
        """Kill the process and its child."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._connection.close()
        # shielded: a wait that is cancelled before its thread begins would leave a zombie
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._process.wait))
