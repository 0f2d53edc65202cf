"""Extraction in worker processes that may hang, crash or leak: each costs its page and its process, nothing else.

`corpus.extract.worker` is the other end of the socket, and says what passes through it.
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
from types import TracebackType
from typing import Any

import orjson

from common.errors import PageError, ToolkitError
from common.settings import ScrapeSettings
from corpus.extract.extractors import Extracted
from corpus.extract.worker import LENGTH, MODULES, SIGNALLED

PAGES_PER_WORKER = 500  # then its child is replaced: lxml and its users leak
_SHARED_END = 1.0  # seconds; a job's processes are killed one by one, and no page is to blame when a worker goes first
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class _Page:
    """A page to extract, and where its answer goes."""

    content: tuple[bytes, str, str]
    """Body, content type, URL."""
    answer: "asyncio.Future[dict[str, Any]]"

    def succeed(self, answer: dict[str, Any]) -> None:
        """Answer, if anybody still waits."""
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Answer with an error, if anybody still waits."""
        if not self.answer.done():
            self.answer.set_exception(error)


class ExtractPool:
    """`workers` processes, each started when a page needs it."""

    def __init__(self, settings: ScrapeSettings, workers: int) -> None:
        self._settings, self._workers = settings, workers
        self._pages: asyncio.Queue[_Page] = asyncio.Queue()

    async def __aenter__(self) -> "ExtractPool":
        self._tasks = [asyncio.create_task(self._work()) for _ in range(self._workers)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def extract(self, body: bytes, content_type: str, url: str) -> Extracted:
        """The text of a page. Raises PageError with the reason (`extract_timeout`, `extract_memory`, …)."""
        page = _Page((body, content_type, url), asyncio.get_running_loop().create_future())
        self._pages.put_nowait(page)
        answer = await page.answer
        if "reason" in answer:
            raise PageError(answer["reason"])
        return Extracted(**answer)

    async def _work(self) -> None:
        """Feed one process, and its successor when it has died."""
        while True:
            page = await self._pages.get()
            try:
                worker = await _Worker.start(self._settings)
            except Exception as error:  # whoever waits for the page decides
                page.fail(error)
                continue
            try:
                await self._feed(worker, page)
            finally:
                await worker.stop()

    async def _feed(self, worker: "_Worker", page: _Page) -> None:
        """Hand out pages until one of them kills the worker; the one behind it goes back.

        That next one is sent while the worker is busy, which so never waits for a turn of this event loop.
        """
        sending, following = asyncio.create_task(worker.send(page)), None
        try:
            while True:
                await sending
                following = None if self._pages.empty() else self._pages.get_nowait()
                if following is not None:
                    sending = asyncio.create_task(worker.send(following))
                page.succeed(await worker.answer())
                if following is None:
                    following = await self._pages.get()
                    sending = asyncio.create_task(worker.send(following))
                page = following
        except Exception as error:
            page.fail(error)
            if following is not None and following is not page:
                self._pages.put_nowait(following)
        finally:
            sending.cancel()
            await asyncio.wait([sending])  # it must not use a socket that is closed


class _Worker:
    """The parent's end of one process."""

    def __init__(self, process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
        self._process, self._connection = process, connection

    @classmethod
    async def start(cls, settings: ScrapeSettings) -> "_Worker":
        """Start a process and wait until its libraries are loaded."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])}
        numbers = (PAGES_PER_WORKER, settings.extract_timeout, settings.extract_memory_mb)
        command = [sys.executable, "-m", "corpus.extract.worker", *map(str, numbers), *settings.extractors]
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            # No asyncio subprocess: when its start is cancelled, waiting for its end may take for ever (Python 3.11).
            # A process group for `stop`; also, Ctrl-C is for the parent to handle.
            process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment, process_group=0)
        worker = cls(process, ours)
        try:
            await worker._read()
        except EOFError:
            await worker.stop()
            raise ToolkitError(
                f"an extraction worker did not start; try {sys.executable} -c 'import {', '.join(MODULES)}'"
            ) from None
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def send(self, page: _Page) -> None:
        """Put a page into the socket; that the process is gone shows when it should answer."""
        request = pickle.dumps(page.content)
        with suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(self._connection, LENGTH.pack(len(request)) + request)

    async def answer(self) -> dict[str, Any]:
        """Its answer to the first page without one. Raises PageError when the process died of it."""
        try:
            answer: dict[str, Any] = orjson.loads(await self._read())
        except (EOFError, ConnectionError):
            code = await asyncio.to_thread(self._process.wait)
            if code in (-signal.SIGKILL, SIGNALLED + signal.SIGKILL):
                await asyncio.sleep(_SHARED_END)
            raise PageError("extract_timeout" if code == SIGNALLED + signal.SIGALRM else "extract_crash") from None
        return answer

    async def _read(self) -> bytearray:
        """The next frame. Raises EOFError where the process is gone."""
        (length,) = LENGTH.unpack(await self._receive(LENGTH.size))
        return await self._receive(length)

    async def _receive(self, size: int) -> bytearray:
        received = bytearray(size)
        rest = memoryview(received)
        while rest:
            count = await asyncio.get_running_loop().sock_recv_into(self._connection, rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return received

    async def stop(self) -> None:
        """End the process and its child, whatever they are doing."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._connection.close()
        await asyncio.to_thread(self._process.wait)
