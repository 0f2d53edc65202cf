"""Extraction in worker processes that may hang, crash or leak: each costs its page and its process, nothing else.

A worker (`python -m corpus.extract_pool`, started by ExtractPool) takes and gives frames through the socket that is
its standard input:

    frame     u32 length, then as many bytes
    to it     pickle of (body, content type, URL)
    from it   one empty frame when it is ready; then JSON: {"text", "title", ...} or {"reason"}

It loads the libraries (a second of work) and leaves the pages to a child, forked afresh every PAGES_PER_WORKER pages
(milliseconds). The child kills itself by an alarm when a page takes too long, so that a hung one ends even after its
parents were killed; its death, whatever the cause, is the worker's.
"""

import asyncio
import gc
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from common.errors import ToolkitError
from common.settings import ScrapeSettings
from corpus.extract import Extracted, Extractor, NothingExtracted, extract, load_extractors
from corpus.network import PageError

PAGES_PER_WORKER = 500  # then its child is replaced: lxml and its users leak
_LENGTH = struct.Struct(">I")
_SHARED_END = 1.0  # seconds; a job's processes are killed one by one, and no page is to blame when a worker goes first
_ROOT = Path(__file__).resolve().parent.parent


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
        """The text of a page. Raises PageError with the reason (`extract_timeout`, `extract_crash`, …)."""
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
        numbers = (PAGES_PER_WORKER, settings.extract_timeout)
        command = [sys.executable, "-m", "corpus.extract_pool", *map(str, numbers), *settings.extractors]
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
                f"an extraction worker did not start; try {sys.executable} -c 'import {', '.join(_MODULES)}'"
            ) from None
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def send(self, page: _Page) -> None:
        """Put a page into the socket; that the process is gone shows when it should answer."""
        request = pickle.dumps(page.content)
        with suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(self._connection, _LENGTH.pack(len(request)) + request)

    async def answer(self) -> dict[str, Any]:
        """Its answer to the first page without one. Raises PageError when the process died of it."""
        try:
            answer: dict[str, Any] = orjson.loads(await self._read())
        except (EOFError, ConnectionError):
            code = await asyncio.to_thread(self._process.wait)
            if code in (-signal.SIGKILL, _SIGNALLED + signal.SIGKILL):
                await asyncio.sleep(_SHARED_END)
            raise PageError("extract_timeout" if code == _SIGNALLED + signal.SIGALRM else "extract_crash") from None
        return answer

    async def _read(self) -> bytearray:
        """The next frame. Raises EOFError where the process is gone."""
        (length,) = _LENGTH.unpack(await self._receive(_LENGTH.size))
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


_MODULES = ("trafilatura", "newspaper", "lxml_html_clean")
_FIRST_PAGE = b"<html><body><article><h1>Title</h1><p>The first page is slow.</p></article></body></html>"
_RETIRED = 75  # exit code of a child that has answered its share of pages
_SIGNALLED = 128  # exit code of a worker whose child was killed by a signal: this much more, as in a shell


# ---------------------------------------------------------------------------------------------- in the worker


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: extraction is offline, whatever a library thinks it needs to look up."""
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise PermissionError(f"no network during extraction ({event})")


def _serve(connection: socket.socket, pages: int, timeout: float, extractors: Sequence[Extractor]) -> bool:
    """Answer `pages` requests; False when the parent closed the socket, or is gone, before that."""
    for _ in range(pages):
        # exactly one frame: the next one may be for the next child
        if len(head := connection.recv(_LENGTH.size, socket.MSG_WAITALL)) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack(head)
        if len(request := connection.recv(length, socket.MSG_WAITALL)) < length:
            return False
        body, content_type, url = pickle.loads(request)
        signal.setitimer(signal.ITIMER_REAL, timeout)
        try:
            answer = extract(body, content_type, url, extractors).as_dict()
        except NothingExtracted as nothing:
            answer = {"reason": str(nothing)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _give(connection, orjson.dumps(answer))
    return True


def _give(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(frame)) + frame)


def _worker_main() -> int:
    """Load the libraries, then fork one child after the other; returns the code of the last one."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a job: the parent ends the workers
    pages, timeout, *names = sys.argv[1:]
    connection = socket.socket(fileno=sys.stdin.fileno())
    os.dup2(2, 1)  # what a library prints belongs into the log
    sys.addaudithook(_refuse_network)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process at once, even inside a C library
    extractors = load_extractors(names)
    with suppress(NothingExtracted):
        extract(_FIRST_PAGE, "text/html", "", extractors)  # loads what the libraries put off
    gc.freeze()  # the children share it
    _give(connection, b"")
    while True:
        child = os.fork()
        if child == 0:
            try:
                more = _serve(connection, int(pages), float(timeout), extractors)
            except ConnectionError:
                more = False
            os._exit(_RETIRED if more else 0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != _RETIRED:
            return code if code >= 0 else _SIGNALLED - code


if __name__ == "__main__":
    sys.exit(_worker_main())
