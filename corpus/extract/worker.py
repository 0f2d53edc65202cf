"""The extraction of pages in a process of its own, which may hang, crash or leak (`corpus.extract.pool` starts it).

It takes and gives frames through the socket that is its standard input:

    frame     u32 length, then as many bytes
    to it     pickle of (body, content type, URL)
    from it   one empty frame when it is ready; then JSON: {"text", "title", ...} or {"reason"}

It loads the libraries (a second of work) and leaves the pages to a child, forked again after some hundred pages
(milliseconds). The child kills itself by an alarm when a page takes too long; its death, whatever the cause, is the
worker's. Both end with their parents, also when these are killed.

A page may map `memory` bytes; RLIMIT_AS of a child is a third more. Where that is reached libraries give up, crash,
or go on with half a page, so that an answer counts only when its page kept to `memory`. What earlier pages left behind
must not decide: a child that holds much of them is replaced, and a used one that meets a large page, or dies of a page,
hands it on to a fresh one.
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
from corpus.extract.extractors import Extractor, NothingExtracted, extract, load_extractors

LENGTH = struct.Struct(">I")
MODULES = ("trafilatura", "newspaper", "lxml_html_clean")
SIGNALLED = 128  # exit code of a worker whose child was killed by a signal: this much more, as in a shell
_RETIRED = 75  # exit code of a child that is to be replaced
_NO_MEMORY = {"reason": "extract_memory"}
_FIRST_PAGE = b"<html><body><article><h1>Title</h1><p>The first page is slow.</p></article></body></html>"
_SLACK = 1 / 3  # of the memory: what pages may leave behind in a child, and what its limit has on top


class _Kept:
    """The request under way in a child with a past: the next child finds it here if this one dies of it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("request")

    def put(self, request: bytes) -> None:
        """Keep a request."""
        os.pwrite(self._file, request, 0)

    def clear(self) -> None:
        """Keep none."""
        os.ftruncate(self._file, 0)

    def holds(self) -> bool:
        """Whether there is a request."""
        return os.fstat(self._file).st_size > 0

    def take(self) -> bytes | None:
        """The request, which is kept no longer."""
        request = os.pread(self._file, os.fstat(self._file).st_size, 0)
        self.clear()
        return request or None


class _Memory:
    """What a child has mapped since its start, in pages' worth: 1 is what a page may map."""

    def __init__(self, memory: int) -> None:
        self._memory, self._start = memory, self._mapped("VmSize")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = self._start + int(memory * (1 + _SLACK))
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))

    def now(self) -> float:
        """What is mapped now."""
        return (self._mapped("VmSize") - self._start) / self._memory

    def peak(self) -> float:
        """The most that was mapped at once."""
        return (self._mapped("VmPeak") - self._start) / self._memory

    @staticmethod
    def _mapped(name: str) -> int:
        """Bytes, by a name of /proc/self/status."""
        return 1024 * int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: extraction is offline, whatever a library thinks it needs to look up."""
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise PermissionError(f"no network during extraction ({event})")


def _next_request(connection: socket.socket) -> bytes | None:
    """Exactly one frame, as the next may be for the next child; None when the parent closed the socket or is gone."""
    if len(head := connection.recv(LENGTH.size, socket.MSG_WAITALL)) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    request = connection.recv(length, socket.MSG_WAITALL)
    return request if len(request) == length else None


def _answer(request: bytes, timeout: float, extractors: Sequence[Extractor]) -> dict[str, Any]:
    """Text or reason. A page that takes longer than `timeout` ends the process."""
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        body, content_type, url = pickle.loads(request)
        return extract(body, content_type, url, extractors).as_dict()
    except NothingExtracted as nothing:
        return {"reason": str(nothing)}
    except MemoryError:
        return _NO_MEMORY
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _serve(
    connection: socket.socket, kept: _Kept, pages: int, timeout: float, memory: _Memory, extractors: Sequence[Extractor]
) -> bool:
    """Answer up to `pages` requests, the kept one first; False when the parent is gone."""
    request = kept.take()
    for served in range(pages):
        if request is None and (request := _next_request(connection)) is None:
            return False
        if served:
            kept.put(request)
        answer = _answer(request, timeout, extractors)
        peak = memory.peak()
        if answer == _NO_MEMORY or peak > (1 - _SLACK if served else 1):
            if served:
                return True  # the request is kept
            answer = _NO_MEMORY
        kept.clear()
        _give(connection, orjson.dumps(answer))
        if peak > 1 - _SLACK or memory.now() > _SLACK:
            return True
        request = None
    return True


def _give(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(LENGTH.pack(len(frame)) + frame)


def _worker_main() -> int:
    """Load the libraries, then fork one child after the other; returns the code of the last one."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # sent to all processes of a job: the parent ends the workers
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()  # should it be gone already, the socket says so
    pages, timeout, megabytes, *names = sys.argv[1:]
    connection = socket.socket(fileno=sys.stdin.fileno())
    os.dup2(2, 1)  # what a library prints belongs into the log
    sys.addaudithook(_refuse_network)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process at once, even inside a C library
    extractors = load_extractors(names)
    with suppress(NothingExtracted):
        extract(_FIRST_PAGE, "text/html", "", extractors)  # loads what the libraries put off
    gc.freeze()  # the children share it
    kept = _Kept()
    _give(connection, b"")
    this = os.getpid()
    while True:
        child = os.fork()
        if child == 0:
            die_with_parent(this)
            memory = _Memory(int(megabytes) << 20)
            try:
                more = _serve(connection, kept, int(pages), float(timeout), memory, extractors)
            except ConnectionError:
                more = False
            os._exit(_RETIRED if more else 0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code in (0, -signal.SIGALRM, -signal.SIGKILL):
            kept.clear()  # it has no other ending in a fresh child, or nobody waits for it
        if code != _RETIRED and not kept.holds():
            return code if code >= 0 else SIGNALLED - code


if __name__ == "__main__":
    sys.exit(_worker_main())
