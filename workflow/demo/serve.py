"""Serve a recorded site on loopback while a command runs; ADDRESS in it becomes ip:port.

    python -m workflow.demo.serve --site results/demo/site
    python -m workflow.demo.serve --site results/demo/site -- curl -s -H 'Host: handbook.example' http://ADDRESS/robots.txt

Without a command it serves until Ctrl-C. The exit code is the command's. The Host header and the
path select a page. Server and command end together, even if one of them or their parent is killed.

A recorded site is a folder of responses:

    site.json    {"format": 1, "pages": [{"url", "status", "headers", "body", "delay"}, ...]}
    urls.txt     the URLs to scrape, one per line
    pages/NNNN   the bodies of the responses

Host and path identify a page; the scheme is ignored. `delay` is the seconds before the first byte.
"""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from yarl import URL

from common import cli
from common.child_process import die_with_parent
from common.errors import InputError
from common.files import naming, read_json, write_json, write_text

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


class _Server(ThreadingHTTPServer):
    """A thread per connection; a page that hangs does not delay the end of the process."""

    request_queue_size = 1024

    def handle_error(self, *_arguments: object) -> None:
        """Ignore clients that left before the answer."""


@contextlib.contextmanager
def serve(folder: Path, requested: list[str] | None = None) -> Iterator[str]:
    """Serve a site from threads of this process, and yield its `ip:port`.

    Appends the host and path of each request to `requested`, in order of arrival.
    """
    pages = {_route(page): page for page in read_site(folder)}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # otherwise a body waits for the acknowledgement of its headers

        def do_GET(self) -> None:
            route = self.headers.get("Host", "").lower() + self.path
            if requested is not None:
                requested.append(route)
            page = pages.get(route, _NOT_FOUND)
            time.sleep(page.delay)
            self.send_response(page.status)
            for name, value in {**page.headers, "Content-Length": str(len(page.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(page.body)

        def log_message(self, *_arguments: object) -> None:
            """Log nothing: the client says what it fetched."""

    with _Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        try:
            yield "{}:{}".format(*server.server_address)
        finally:
            server.shutdown()


def _route(page: Page) -> str:
    """Host and path of a page, as in a client's request."""
    url = URL(page.url)
    return f"{url.host_port_subcomponent}{url.raw_path_qs}"


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
        # kills the command if this process is stopped: without the server, a scrape would only fail
        code = subprocess.run(command, preexec_fn=die_with_parent).returncode
        return code if code >= 0 else 128 - code  # as a shell does for signals


if __name__ == "__main__":
    sys.exit(cli.run(main))
