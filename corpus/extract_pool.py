"""Extraction in worker processes that may hang, crash or leak: each costs its page and its process, nothing else.

A worker (`python -m corpus.extract_pool`, started by ExtractPool) takes and gives frames through a socket, its
standard input and output:

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
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import orjson

from common.errors import ToolkitError
from common.settings import ScrapeSettings
from corpus.extract import Extracted, Extractor, NothingExtracted, extract, load_extractors
from corpus.network import PageError

PAGES_PER_WORKER = 500  # then its child is replaced: lxml and its users leak
_LENGTH = struct.Struct(">I")
_SHARED_END = 1.0  # seconds; a job's processes are killed one by one, and no page is to blame when a worker goes first
_ROOT = Path(__file__).resolve().parent.parent


class ExtractPool:
    """Up to `workers` processes, started when first needed."""

    def __init__(self, settings: ScrapeSettings, workers: int) -> None:
        self._settings = settings
        self._idle: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()  # None: a process yet to be started
        for _ in range(workers):
            self._idle.put_nowait(None)
        self._running: set[_Worker] = set()

    async def __aenter__(self) -> "ExtractPool":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in list(self._running):
            await self._stop(worker)

    async def extract(self, body: bytes, content_type: str, url: str) -> Extracted:
        """The text of a page. Raises PageError with the reason (`extract_timeout`, `extract_crash`, …)."""
        worker = await self._idle.get()
        try:
            if worker is None:
                worker = await _Worker.start(self._settings)
                self._running.add(worker)
            answer = await worker.ask(body, content_type, url)
        except BaseException:  # the page's failure, or our own end
            if worker is not None:
                await self._stop(worker)
            worker = None
            raise
        finally:
            self._idle.put_nowait(worker)
        if "reason" in answer:
            raise PageError(answer["reason"])
        return Extracted(**answer)

    async def _stop(self, worker: "_Worker") -> None:
        self._running.discard(worker)
        await worker.stop()


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
            end = theirs.fileno()
            process = subprocess.Popen(command, stdin=end, stdout=end, env=environment, process_group=0)
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

    async def ask(self, body: bytes, content_type: str, url: str) -> dict[str, Any]:
        """Its answer to one page. Raises PageError when the process died of it."""
        request = pickle.dumps((body, content_type, url))
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(self._connection, _LENGTH.pack(len(request)) + request)
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


def _serve(
    requests: IO[bytes],
    answers: IO[bytes],
    pages: int,
    timeout: float,
    extractors: Sequence[Extractor],
) -> bool:
    """Answer `pages` requests; False when the parent closed the stream, or is gone, before that."""
    for _ in range(pages):
        if not (length := requests.read(_LENGTH.size)):
            return False
        body, content_type, url = pickle.loads(requests.read(*_LENGTH.unpack(length)))
        signal.setitimer(signal.ITIMER_REAL, timeout)
        try:
            answer = extract(body, content_type, url, extractors).as_dict()
        except NothingExtracted as nothing:
            answer = {"reason": str(nothing)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        frame = orjson.dumps(answer)
        answers.write(_LENGTH.pack(len(frame)) + frame)
        answers.flush()
    return True


def _worker_main() -> int:
    """Load the libraries, then fork one child after the other; returns the code of the last one."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a job: the parent ends the workers
    pages, timeout, *names = sys.argv[1:]
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not write into the frames
    sys.addaudithook(_refuse_network)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process at once, even inside a C library
    extractors = load_extractors(names)
    with suppress(NothingExtracted):
        extract(_FIRST_PAGE, "text/html", "", extractors)  # loads what the libraries put off
    gc.freeze()  # the children share it
    answers.write(_LENGTH.pack(0))
    answers.flush()
    while True:
        child = os.fork()
        if child == 0:
            try:
                more = _serve(requests, answers, int(pages), float(timeout), extractors)
            except (ConnectionError, EOFError, pickle.UnpicklingError, struct.error):
                more = False  # the parent is gone, in the middle of a frame
            os._exit(_RETIRED if more else 0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != _RETIRED:
            return code if code >= 0 else _SIGNALLED - code


if __name__ == "__main__":
    sys.exit(_worker_main())
