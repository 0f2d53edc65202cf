"""Serve a recorded site on loopback while a command runs; ADDRESS in the command is replaced by ip:port.

    python -m workflow.demo.serve --site results/demo/site
    python -m workflow.demo.serve --site results/demo/site -- curl -s -H 'Host: handbook.example' http://ADDRESS/robots.txt

Without a command it serves until Ctrl-C. The exit code is the command's. The Host header and the path select a page.
Server and command end together, even if one of them or their parent process is killed.

A recorded site is a folder of responses:

    site.json    {"format": 1, "pages": [{"url", "status", "headers", "body", "delay"}, ...]}
    urls.txt     the URLs to scrape, one per line
    pages/NNNN   the bodies of the responses

A page is identified by host and path; the scheme is ignored. `delay` is the time before the first byte, in seconds.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common import cli
from common.child_process import die_with_parent
from common.errors import InputError
from common.files import naming, read_json, write_json, write_text

if TYPE_CHECKING:
    from aiohttp import web

_FORMAT = 1
HTML = "text/html; charset=utf-8"


@dataclass(frozen=True)
class Page:
    """One recorded response."""

    url: str
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": HTML})
    delay: float = 0.0


def write_site(folder: Path, pages: Iterable[Page], urls: Sequence[str]) -> None:
    """Write a site; `site.json` is written last and marks it as complete."""
    (folder / "pages").mkdir(parents=True, exist_ok=True)
    entries = []
    for number, page in enumerate(pages):
        body = f"pages/{number:04d}"
        with naming(folder / body):
            (folder / body).write_bytes(page.body)
        entry = {"url": page.url, "status": page.status, "headers": page.headers, "body": body, "delay": page.delay}
        entries.append(entry)
    write_text(folder / "urls.txt", "".join(f"{url}\n" for url in urls))
    write_json(folder / "site.json", {"format": _FORMAT, "pages": entries})


def read_site(folder: Path) -> list[Page]:
    """The pages of a site. Raises InputError if the folder is not a complete site."""
    path = folder / "site.json"
    site = read_json(path)
    if not isinstance(site, dict) or site.get("format") != _FORMAT:
        raise InputError(f"{path}: not a recorded site of format {_FORMAT}; make it again")
    try:
        return [Page(**{**entry, "body": (folder / entry["body"]).read_bytes()}) for entry in site["pages"]]
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: a page lacks {error}; make the site again") from None


_NOT_FOUND = Page("", b"<html><body><h1>404 Not Found</h1></body></html>", 404)


@contextlib.contextmanager
def serve(folder: Path, requested: list[str] | None = None) -> Iterator[str]:
    """Serve a site from a thread of this process, and yield its `ip:port`.

    Appends the host and path of each request to `requested`, in order of arrival.
    """
    pages = {_route(page): page for page in read_site(folder)}
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        loop, stop = runner.get_loop(), asyncio.Event()

        def work() -> None:
            with runner:  # cancels requests that still hang
                runner.run(_serve(listener, pages, requested, stop))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield "{}:{}".format(*listener.getsockname())
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()


def _route(page: Page) -> str:
    """Host and path of a page, as in a client's request."""
    from yarl import URL

    url = URL(page.url)
    return f"{url.host_port_subcomponent}{url.raw_path_qs}"


async def _serve(
    listener: socket.socket, pages: dict[str, Page], requested: list[str] | None, stop: asyncio.Event
) -> None:
    from aiohttp import web

    async def answer(request: "web.BaseRequest") -> "web.StreamResponse":
        route = request.host.lower() + request.raw_path
        if requested is not None:
            requested.append(route)
        page = pages.get(route, _NOT_FOUND)
        await asyncio.sleep(page.delay)
        return web.Response(status=page.status, headers=page.headers, body=page.body)

    # a page that hangs must not delay the shutdown (for aiohttp, 0 means no limit)
    runner = web.ServerRunner(web.Server(answer, access_log=None), shutdown_timeout=0.05)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    await stop.wait()
    await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the command's exit code."""
    parser = cli.parser("workflow.demo.serve", __doc__)
    parser.add_argument("--site", type=cli.input_path, required=True, metavar="DIR", help="folder of a recorded site")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="after --: the command to run with the site")
    arguments = parser.parse_args(argv)
    die_with_parent()
    with serve(arguments.site) as address:
        if not arguments.command:
            print(address, flush=True)
            threading.Event().wait()
        command = [argument.replace("ADDRESS", address) for argument in arguments.command]
        # without the server, a scrape would record refused connections, so it must not outlive it
        process = subprocess.Popen(command, preexec_fn=die_with_parent)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return code if code >= 0 else 128 - code  # as a shell does for signals


if __name__ == "__main__":
    sys.exit(cli.run(main))
