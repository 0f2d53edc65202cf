"""A worker process that extracts pages, and may hang, crash or leak; `corpus.extract.pool` starts it.

It exchanges frames with the pool over a socket, its standard input:

    frame      u32 length, then that many bytes
    request    pickle of (body, content type, URL)
    reply      an empty frame when the worker is ready; then JSON: {"text", "title", ...} or {"reason"}

The worker loads the libraries (a second) and forks a child that extracts the pages. The child is replaced after some
hundred pages (milliseconds). An alarm kills the child if a page takes too long, and the worker exits when its child
dies. Both exit with their parents, even if those are killed.

A page may map `memory` bytes; RLIMIT_AS of a child is a third more. At that limit libraries give up, crash or return
half a page, so a result only counts if its page stayed within `memory`. What earlier pages leaked must not decide: a
child that leaked much is replaced, and if a used child meets a large page or dies, a fresh child retries the page.
"""

import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from common.child_process import die_with_parent
from common.errors import PageError
from corpus.extract.extractors import Extractor, extract, load_extractors

LENGTH = struct.Struct(">I")
SIGNAL_EXIT = 128  # as in a shell: the worker's exit code is this plus the signal that killed its child
_REPLACE = 75  # exit code of a child that asks to be replaced
_OUT_OF_MEMORY = {"reason": "extract_memory"}
_WARM_UP = b"<html><body><article><h1>Title</h1><p>The first page is slow.</p></article></body></html>"
_SLACK = 1 / 3  # of the memory: how much a child may leak, and how far its limit exceeds `memory`


class _RetryFile:
    """The request that a used child is working on, in shared memory: a fresh child retries it if this one dies."""

    def __init__(self) -> None:
        self._file = os.memfd_create("request")

    def store(self, request: bytes) -> None:
        """Store a request."""
        os.pwrite(self._file, request, 0)

    def clear(self) -> None:
        """Remove the request."""
        os.ftruncate(self._file, 0)

    def is_empty(self) -> bool:
        """Whether there is no request."""
        return os.fstat(self._file).st_size == 0

    def pop(self) -> bytes | None:
        """Remove and return the request, if any."""
        request = os.pread(self._file, os.fstat(self._file).st_size, 0)
        self.clear()
        return request or None


class _MemoryUse:
    """Memory that a child has mapped since its start, as a fraction of what one page may map."""

    def __init__(self, memory: int) -> None:
        self._memory, self._start = memory, self._mapped("VmSize")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = self._start + int(memory * (1 + _SLACK))
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))

    def now(self) -> float:
        """Memory mapped now."""
        return (self._mapped("VmSize") - self._start) / self._memory

    def peak(self) -> float:
        """The most memory mapped at any time."""
        return (self._mapped("VmPeak") - self._start) / self._memory

    @staticmethod
    def _mapped(name: str) -> int:
        """A field of /proc/self/status, in bytes."""
        return 1024 * int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: extraction is offline, whatever a library tries to look up."""
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise PermissionError(f"no network during extraction ({event})")


def _next_request(connection: socket.socket) -> bytes | None:
    """Read exactly one frame, as the next may be for the next child; None if the pool closed the socket or is gone."""
    if len(head := connection.recv(LENGTH.size, socket.MSG_WAITALL)) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    request = connection.recv(length, socket.MSG_WAITALL)
    return request if len(request) == length else None


def _process(request: bytes, timeout: float, extractors: Sequence[Extractor]) -> dict[str, Any]:
    """The reply to a request. The process is killed if it takes longer than `timeout` seconds."""
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        body, content_type, url = pickle.loads(request)
        return extract(body, content_type, url, extractors).as_dict()
    except PageError as error:
        return {"reason": error.reason}
    except MemoryError:
        return _OUT_OF_MEMORY
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _serve(
    connection: socket.socket,
    retry: _RetryFile,
    pages: int,
    timeout: float,
    memory: _MemoryUse,
    extractors: Sequence[Extractor],
) -> bool:
    """Process up to `pages` requests, first the one to retry. Returns False if the pool is gone."""
    request = retry.pop()
    for served in range(pages):
        if request is None and (request := _next_request(connection)) is None:
            return False
        if served:
            retry.store(request)
        reply = _process(request, timeout, extractors)
        peak = memory.peak()
        if reply == _OUT_OF_MEMORY or peak > (1 - _SLACK if served else 1):
            if served:
                return True  # a fresh child retries the request
            reply = _OUT_OF_MEMORY
        retry.clear()
        _send(connection, orjson.dumps(reply))
        if peak > 1 - _SLACK or memory.now() > _SLACK:
            return True
        request = None
    return True


def _send(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(LENGTH.pack(len(frame)) + frame)


def _worker_main() -> int:
    """Load the libraries, then fork one child after another; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # batch systems signal every process of a job; the pool stops us
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()  # if it is gone already, the socket is closed
    pages, timeout, megabytes, *names = sys.argv[1:]
    connection = socket.socket(fileno=sys.stdin.fileno())
    os.dup2(2, 1)  # what a library prints goes to the log
    sys.addaudithook(_refuse_network)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills the process at once, even inside a C library
    extractors = load_extractors(names)
    with suppress(PageError):
        extract(_WARM_UP, "text/html", "", extractors)  # runs the libraries' lazy imports
    gc.freeze()  # keeps these objects shared with the children
    retry = _RetryFile()
    _send(connection, b"")
    worker = os.getpid()
    while True:
        child = os.fork()
        if child == 0:
            die_with_parent(worker)
            memory = _MemoryUse(int(megabytes) << 20)
            try:
                more = _serve(connection, retry, int(pages), float(timeout), memory, extractors)
            except ConnectionError:
                more = False
            os._exit(_REPLACE if more else 0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code in (0, -signal.SIGALRM, -signal.SIGKILL):
            retry.clear()  # a fresh child would time out again, or nobody waits for the reply
        if code != _REPLACE and retry.is_empty():
            return code if code >= 0 else SIGNAL_EXIT - code


if __name__ == "__main__":
    sys.exit(_worker_main())
