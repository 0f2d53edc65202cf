"""Extraction in worker processes: a page that hangs, crashes or exhausts memory fails alone.

    with Workers(8) as pool:
        pool.start()
        extracted = pool.submit(partial(extract_in_child, settings), page).result()

Each worker loads the libraries (a second), then forks a child that extracts its pages (milliseconds
to replace). The kernel kills a child whose page takes too much CPU time. The load of the machine
must not decide which pages are kept: a child that waited too long for the CPU, or was killed by
somebody else (the kernel, when memory runs out), ends the command instead of costing its page.
Workers end with the pool's process and children with their worker, even after kill -9.

A page may map `extract_memory_mb`; RLIMIT_AS of a child is a third more. At that limit libraries
give up, crash or return half a page, so a result only counts if its page stayed within the memory.
Leaks of earlier pages must not decide: a child that leaked much is replaced, and a page that is
large for a used child or kills it is tried again in a fresh one. pebble's pool has no fresh process
on demand.
"""

import gc
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, cast

from common.child_process import die_with_parent
from common.errors import PageError, ToolkitError
from common.settings import ScrapeSettings
from corpus.extract.charset import decode
from corpus.extract.extractors import Extracted, Extractor, extract, load_extractors
from corpus.scrape.opt_outs import check_headers, meta_opt_out
from corpus.scrape.response import FetchedPage

PAGES_PER_CHILD = 500  # then it is replaced: lxml and the libraries above it leak
_PATIENCE = 60  # times `extract_timeout`: wall-clock time after which a slow page ends the command
_OUT_OF_MEMORY = "extract_memory"
_SLACK = 1 / 3  # of the memory: how much a child may leak, and how far its limit exceeds the page's


# ------------------------------------------------------------ in a worker

_child: "_Child | None" = None
"""The child of this worker process."""


def extract_in_child(settings: ScrapeSettings, page: FetchedPage) -> Extracted | str:
    """The text of a page, or the reason why it has none (`extract_timeout`, `extract_memory`, …).

    This process' child extracts it, or a fresh child if the used one cannot decide. Raises
    ToolkitError if the library of an extractor is missing, or if somebody else killed the child.
    """
    global _child
    while True:
        child = _child = _child or _Child(settings)
        was_used, child.used = child.used, True
        try:
            child.connection.send(page)
            reply, leaving = child.connection.recv()
        except (EOFError, ConnectionError):
            _child, code = None, child.wait()
            if code == -signal.SIGPROF:
                return "extract_timeout"
            if code == -signal.SIGALRM:
                waited = f"{_PATIENCE * settings.extract_timeout:.0f} s were not enough to extract it"
                raise ToolkitError(f"{page.url}: {waited}; the machine is overloaded: use fewer --workers") from None
            if code == -signal.SIGKILL:
                cure = "if memory ran out, use fewer --workers or more memory"
                raise ToolkitError(f"{page.url}: its extraction was killed (SIGKILL); {cure}") from None
            if not was_used:
                return "extract_crash"
            continue
        if leaving:
            _child = None
            child.wait()
        if reply is not None:
            return cast(Extracted | str, reply)


class _Child:
    """A process that extracts pages, forked from this worker."""

    def __init__(self, settings: ScrapeSettings) -> None:
        extractors, worker = _load(tuple(settings.extractors)), os.getpid()
        self.used = False
        self.connection, theirs = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self.connection.close()
            _serve(theirs, settings, extractors, worker)
        theirs.close()

    def wait(self) -> int:
        """The exit code; negative for a signal."""
        self.connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


@lru_cache(1)
def _load(names: tuple[str, ...]) -> Sequence[Extractor]:
    """Load the libraries, which the children share."""
    os.dup2(2, 1)  # what a library prints goes to the log
    sys.addaudithook(_refuse_network)
    try:
        extractors = load_extractors(names)
    except ImportError as error:
        raise ToolkitError(f"scrape.extractors: {', '.join(names)} cannot be imported: {error}") from None
    gc.freeze()  # keeps these objects in pages shared with the children
    return extractors


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: refuse network access during extraction."""
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise PermissionError(f"no network during extraction ({event})")


# ------------------------------------------------------------ in a child


def _serve(connection: Connection, settings: ScrapeSettings, extractors: Sequence[Extractor], worker: int) -> NoReturn:
    """Answer pages with (reply, whether this process exits); reply None: ask a fresh child."""
    die_with_parent(worker)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # kills the process at once, even inside a C library
    memory = _Memory(settings.extract_memory_mb << 20)
    with suppress(EOFError, ConnectionError):
        for served in range(1, PAGES_PER_CHILD + 1):
            reply: Extracted | str | None = _reply(connection.recv(), settings, extractors)
            peak, is_fresh = memory.share("VmPeak"), served == 1
            if reply == _OUT_OF_MEMORY or peak > (1 if is_fresh else 1 - _SLACK):
                reply = _OUT_OF_MEMORY if is_fresh else None
            leaving = reply is None or served == PAGES_PER_CHILD or peak > 1 - _SLACK or memory.share("VmSize") > _SLACK
            connection.send((reply, leaving))
            if leaving:
                break
    os._exit(0)


def _reply(page: FetchedPage, settings: ScrapeSettings, extractors: Sequence[Extractor]) -> Extracted | str:
    """The text of a page, or why it has none. SIGPROF ends the process after `extract_timeout`."""
    signal.setitimer(signal.ITIMER_PROF, settings.extract_timeout)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE * settings.extract_timeout)
    try:
        return extract_allowed(page, settings, extractors)
    except PageError as error:
        return error.reason
    except MemoryError:
        return _OUT_OF_MEMORY
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def extract_allowed(page: FetchedPage, settings: ScrapeSettings, extractors: Sequence[Extractor]) -> Extracted:
    """`extract`, if the page has not opted out. Raises PageError with the reason."""
    body, content_type, url = page.body, page.content_type, page.url
    if settings.opt_outs == "obey":
        reason = check_headers(page, settings).reserved_by or ""
        if not content_type.lower().lstrip().startswith("text/plain"):
            reason = meta_opt_out(decode(body, content_type, url), settings, reason)
        if reason:
            raise PageError(reason)
    return extract(body, content_type, url, extractors)


class _Memory:
    """Memory that a child has mapped since its start; sets RLIMIT_AS."""

    def __init__(self, limit: int) -> None:
        self._limit, self._start = limit, _mapped("VmSize")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = self._start + int(limit * (1 + _SLACK))
        resource.setrlimit(resource.RLIMIT_AS, (soft if hard < 0 else min(soft, hard), hard))

    def share(self, field: str) -> float:
        """`VmSize` (now) or `VmPeak`, as a share of what a page may map."""
        return (_mapped(field) - self._start) / self._limit


def _mapped(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0])
