"""Loopback stores of files that behave like real ones, and misbehave when told to: web sites with
directory pages, the Hugging Face Hub with its CDN, and S3. Each is gone with its block.
"""

import contextlib
import gzip
import hashlib
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qs, quote, unquote, urlsplit

_PIECE = 4096  # bytes sent at once


@dataclass(frozen=True)
class Request:
    """What a server was asked: the path as it was sent, header names in lower case."""

    method: str
    host: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def name(self) -> str:
        """`host/path`, decoded and without the query."""
        path = self.path.removeprefix(f"http://{self.host}")  # as proxies are asked
        return self.host + unquote(path.partition("?")[0])


@dataclass(frozen=True)
class Answer:
    """What a server says. `cut`: bytes of the body after which the connection is lost."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    reset: bool = False
    chunked: bool = False

    def but(self, **headers: str | None) -> "Answer":
        """With these header fields, whose names have underscores here; without those of None."""
        changes = {name.replace("_", "-").lower(): value for name, value in headers.items()}
        fields = {name.lower(): value for name, value in self.headers.items()} | changes
        return replace(self, headers={name: value for name, value in fields.items() if value is not None})


Respond = Callable[[Request], Answer]
Fault = Callable[[Request, Respond], Answer]
"""Answers in place of a good server, which it may ask."""


class Server(ThreadingHTTPServer):
    """A running server: what it was asked for in order, and the bytes of bodies that it sent.

    After `pause_after(count)` more of these it sends nothing until `resume()`; `paused` says so.
    """

    daemon_threads = False
    request_queue_size = 256

    def __init__(self, respond: Respond) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.respond = respond
        self.requests: list[Request] = []
        self.sent = self.connections = 0
        self.paused, self._going = threading.Event(), threading.Event()
        self._limit: int | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    @property
    def address(self) -> str:
        return "{}:{}".format(*self.server_address)

    def asked(self, method: str = "GET") -> list[str]:
        """The `host/path` of every request with this method."""
        return [request.name for request in self.requests if request.method == method]

    def pause_after(self, count: int) -> None:
        self.paused.clear()
        self._going.clear()
        self._limit = self.sent + count

    def resume(self) -> None:
        self._limit = None
        self._going.set()

    def count(self, size: int) -> None:
        """Before a piece is sent."""
        if self._limit is not None and self.sent >= self._limit:
            self.paused.set()
            self._going.wait()
        with self._lock:
            self.sent += size

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        self._open.add(request)
        super().process_request_thread(request, client_address)
        self._open.discard(request)

    def stop(self) -> None:
        self.resume()
        self.shutdown()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may leave at any time; what else goes wrong is shown by pytest as ever."""
        with contextlib.suppress(ConnectionError):
            raise


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        sent = self.rfile.read(int(headers.get("content-length", 0)))
        request = Request(self.command, headers.get("host", ""), self.path, headers, sent)
        self.server.requests.append(request)
        answer = self.server.respond(request)
        if answer.cut is None or answer.cut >= 0:
            self.send_response_only(answer.status)
            length = {"transfer-encoding": "chunked"} if answer.chunked else {"content-length": str(len(answer.body))}
            for name, value in (length | dict(answer.headers)).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self._send_body(answer)
        if answer.cut is not None:
            self.close_connection = True
            if answer.reset:  # RST instead of FIN
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

    do_HEAD = do_POST = do_GET

    def _send_body(self, answer: Answer) -> None:
        body = answer.body[: answer.cut]
        for start in range(0, len(body), _PIECE):
            piece = body[start : start + _PIECE]
            self.server.count(len(piece))
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if answer.chunked else piece)
        if answer.chunked and answer.cut is None:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def serving(respond: Respond) -> Iterator[Server]:
    """A server that answers by `respond`."""
    with Server(respond) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()


def send(request: Request, body: bytes, etag: str, modified: str = "") -> Answer:
    """A file as RFC 9110 has it: conditions, and the part that is asked for."""
    asked, size = request.headers, len(body)
    answer = Answer(body).but(
        etag=etag, accept_ranges="bytes", content_type="application/octet-stream", last_modified=modified or None
    )
    if asked.get("if-match", etag) not in (etag, "*") or asked.get("if-unmodified-since", modified) != modified:
        return Answer(b"changed", 412)
    span = re.fullmatch(r"bytes=(\d+)-(\d*)", asked.get("range", ""))
    if span is None or asked.get("if-range", etag) not in (etag, modified):
        return answer
    start, end = int(span[1]), min(int(span[2] or size), size - 1)
    if start >= size:
        return Answer(status=416).but(content_range=f"bytes */{size}")
    return replace(answer, body=body[start : end + 1], status=206).but(content_range=f"bytes {start}-{end}/{size}")


# Faults


def cut(after: int, reset: bool = False) -> Fault:
    """Lose the connection after these bytes of the body; before the head with -1."""
    return lambda request, good: replace(good(request), cut=after, reset=reset)


def longer(by: int) -> Fault:
    """A Content-Length of more bytes than come."""

    def fault(request: Request, good: Respond) -> Answer:
        answer = good(request)
        return replace(answer, cut=len(answer.body)).but(content_length=str(len(answer.body) + by))

    return fault


def status(code: int, **headers: str) -> Fault:
    """Nothing but this status."""
    return lambda request, good: Answer(b"<p>Sorry.", code).but(content_type="text/html", **headers)


def moved(location: str, code: int = 302) -> Fault:
    return status(code, location=location)


def fields(**headers: str | None) -> Fault:
    """Other header fields; None leaves one out."""
    return lambda request, good: good(request).but(**headers)


def body(other: bytes) -> Fault:
    """Other bytes under the same header fields."""
    return lambda request, good: replace(good(request), body=other)


def chunked(request: Request, good: Respond) -> Answer:
    """No Content-Length."""
    return replace(good(request), chunked=True)


def whole(request: Request, good: Respond) -> Answer:
    """Everything, whatever part is asked for."""
    headers = {name: value for name, value in request.headers.items() if name != "range"}
    return good(replace(request, headers=headers)).but(accept_ranges=None)


def no_head(request: Request, good: Respond) -> Answer:
    """GET only."""
    return good(request) if request.method == "GET" else Answer(status=405).but(allow="GET")


# Web sites


def apache_page(path: str, names: Iterable[str]) -> bytes:
    """A directory page of Apache's mod_autoindex with FancyIndexing."""
    sorts = "".join(
        f'<th><a href="?C={key};O=D">{title}</a></th>'
        for key, title in {"N": "Name", "M": "Last modified", "S": "Size", "D": "Description"}.items()
    )
    rows = "".join(
        f'<tr><td valign="top"><img src="/icons/unknown.gif" alt="[   ]"></td><td><a href="{quote(name)}">'
        f'{escape(name)}</a></td><td align="right">2026-11-29 16:02  </td><td align="right"> 12K</td></tr>\n'
        for name in names
    )
    return (
        '<!DOCTYPE HTML PUBLIC "-//W3C//DTD HTML 3.2 Final//EN">\n'
        f"<html>\n <head>\n  <title>Index of {escape(path)}</title>\n </head>\n <body>\n"
        f'<h1>Index of {escape(path)}</h1>\n<table>\n<tr><th valign="top"></th>{sorts}</tr>\n'
        f'<tr><td valign="top"><img src="/icons/back.gif" alt="[PARENTDIR]"></td>'
        f'<td><a href="{quote(path.rstrip("/").rpartition("/")[0])}/">Parent Directory</a></td></tr>\n'
        f"{rows}</table>\n</body></html>\n"
    ).encode()


def nginx_page(path: str, names: Iterable[str]) -> bytes:
    """A directory page of nginx's autoindex, which shortens long names."""
    rows = "".join(
        f'<a href="{quote(name)}">{escape(name if len(name) < 51 else name[:47] + "..>")}</a>'
        f"{' ' * (51 - min(len(name), 50))}29-Nov-2026 16:02     12288\r\n"
        for name in names
    )
    head = f"<html>\r\n<head><title>Index of {escape(path)}</title></head>\r\n<body>\r\n<h1>Index of {escape(path)}"
    return f'{head}</h1><hr><pre><a href="../">../</a>\r\n{rows}</pre><hr></body>\r\n</html>\r\n'.encode()


@dataclass
class Site:
    """Web sites: their files by `host/path`, in folders that have a page unless `pages` has one.

    `faults` of a name answer its next GETs, one each; `always` answers every request for it.
    """

    files: dict[str, bytes]
    page: Callable[[str, Iterable[str]], bytes] = apache_page
    pages: dict[str, bytes] = field(default_factory=dict)
    modified: dict[str, str] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    always: dict[str, Fault] = field(default_factory=dict)

    def __call__(self, request: Request) -> Answer:
        left = self.faults.get(request.name) if request.method == "GET" else None
        if left:
            return left.pop(0)(request, self._good)
        return self.always.get(request.name, lambda request, good: good(request))(request, self._good)

    def _good(self, request: Request) -> Answer:
        name = request.name
        if name in self.files:
            data = self.files[name]
            modified = self.modified.get(name, "Sun, 29 Nov 2026 16:02:00 GMT")
            return send(request, data, f'"{hashlib.md5(data).hexdigest()[:12]}"', modified)
        path = name.partition("/")[2]
        inside = [file.removeprefix(name) for file in self.files if file.startswith(name)]
        if name.endswith("/") and (name in self.pages or inside):
            names = sorted({"".join(file.partition("/")[:2]) for file in inside})
            page = self.pages.get(name) or self.page(f"/{path}", names)
            return Answer(page).but(content_type="text/html;charset=UTF-8")
        if any(file.startswith("/") for file in inside):
            return Answer(status=301).but(location=request.path + "/")
        return Answer(b"not found", 404)


# The Hugging Face Hub


def git_sha1(data: bytes) -> str:
    """The name of a blob in git."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Hub:
    """One dataset on the Hub: its commits, of which `main` is one, and who may read it.

    Answers what huggingface_hub asks, of which a test of these servers convinces itself.
    """

    repo: str
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    main: str = ""
    lfs: Callable[[str], bool] = lambda path: path.endswith((".parquet", ".zst", ".gz"))
    token: str = ""  # private if there is one
    gated: bool = False
    page_size: int = 1000
    cdn_url: str = ""
    faults: dict[str, list[Fault]] = field(default_factory=dict)  # of the next GETs of a path at the CDN
    server: Server = field(init=False)
    cdn: Server = field(init=False)

    def push(self, files: dict[str, bytes]) -> str:
        """A commit on `main` that has these files."""
        digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[digest], self.main = files, digest
        return digest

    def __call__(self, request: Request) -> Answer:
        path = urlsplit(request.path).path
        api, resolve = f"/api/datasets/{self.repo}", f"/datasets/{self.repo}/resolve/"
        if not re.match(rf"(/api)?(/resolve-cache)?/datasets/{re.escape(self.repo)}(/|$)", path):
            return _error(401 if "authorization" not in request.headers else 404, "", "Repository not found")
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return _error(401, "", "Invalid username or password.")
        cached = f"/api/resolve-cache/datasets/{self.repo}/"
        start = next(
            known
            for known in (cached, f"{api}/tree/", f"{api}/paths-info/", f"{api}/revision/", resolve, api)
            if path.startswith(known)
        )
        revision, _, inside = path.removeprefix(start).partition("/")
        commit = {"": self.main, "main": self.main}.get(revision, unquote(revision))
        files, inside = self.commits.get(commit), unquote(inside)
        if files is None:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if start.endswith("/tree/"):
            return self._tree(request, commit, inside)
        if start.endswith("/paths-info/"):
            asked = parse_qs(request.body.decode())["paths"]
            return _json([entry for path in asked if (entry := self._entry(commit, path))])
        if start not in (cached, resolve):
            siblings = [{"rfilename": name} for name in sorted(files)]
            about = {"id": self.repo, "author": self.repo.partition("/")[0], "sha": commit, "siblings": siblings}
            return _json(about | {"private": bool(self.token), "gated": False, "disabled": False, "tags": []})
        if self.gated:  # its files are listed
            return _error(403, "GatedRepo", f"Access to dataset {self.repo} is restricted.")
        if inside not in files:
            return _error(404, "EntryNotFound", "Entry not found").but(x_repo_commit=commit)
        return self._file(request, commit, inside, start == cached)

    def _entry(self, commit: str, path: str) -> dict[str, Any] | None:
        """What the API says about a file or a folder."""
        data = self.commits[commit].get(path)
        if data is None:
            exists = any(name.startswith(f"{path}/") for name in self.commits[commit])
            return {"type": "directory", "oid": git_sha1(path.encode()), "size": 0, "path": path} if exists else None
        entry = {"type": "file", "oid": git_sha1(data), "size": len(data), "path": path}
        if not self.lfs(path):
            return entry
        pointer = _pointer(data)
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": len(pointer)}
        return entry | {"oid": git_sha1(pointer), "lfs": lfs}

    def _tree(self, request: Request, commit: str, folder: str) -> Answer:
        query = {key: values[0] for key, values in parse_qs(urlsplit(request.path).query).items()}
        prefix = f"{folder}/" if folder else ""
        paths = dict[str, None]()
        for name in sorted(self.commits[commit]):
            if name.startswith(prefix):
                parts = name.removeprefix(prefix).split("/")
                depths = range(1, len(parts) + 1) if query["recursive"] == "true" else (1,)
                paths |= dict.fromkeys(prefix + "/".join(parts[:depth]) for depth in depths)
        entries = [self._entry(commit, path) for path in paths]
        if folder and not entries:
            return _error(404, "EntryNotFound", f"{folder} does not exist on {commit}")
        first = int(query.get("cursor", 0))
        answer = _json(entries[first : first + self.page_size])
        if first + self.page_size < len(entries):
            target = f"http://{request.host}{request.path.partition('?')[0]}?recursive={query['recursive']}"
            answer = answer.but(link=f'<{target}&expand=false&cursor={first + self.page_size}>; rel="next"')
        return answer

    def _file(self, request: Request, commit: str, path: str, cached: bool) -> Answer:
        data = self.commits[commit][path]
        digest = hashlib.sha256(data).hexdigest()
        if self.lfs(path):
            location = (
                f"{self.cdn_url}/repos/{digest}?response-content-disposition=inline&X-Amz-Signature=signed-{digest}"
            )
            linked = {"x_linked_etag": f'"{digest}"', "x_linked_size": str(len(data)), "x_repo_commit": commit}
            return Answer(b"Found", 302).but(location=location, etag=f'"{digest}"', **linked)
        if not cached:
            location = (
                f"/api/resolve-cache/datasets/{self.repo}/{commit}/{quote(path, safe='')}?etag=%22{git_sha1(data)}%22"
            )
            return Answer(b"Redirecting", 307).but(location=location, x_repo_commit=commit)
        if "gzip" in request.headers.get("accept-encoding", "") and "range" not in request.headers:
            packed = Answer(gzip.compress(data, mtime=0), headers={"content-encoding": "gzip"})
            return packed.but(etag=f'W/"{git_sha1(data)}"', x_repo_commit=commit)
        return send(request, data, f'"{git_sha1(data)}"').but(x_repo_commit=commit)

    def answer_as_cdn(self, request: Request) -> Answer:
        """The second server, for files in LFS: signed URLs, and no other credentials."""
        digest = urlsplit(request.path).path.rpartition("/")[2]
        found = (
            (path, data)
            for files in self.commits.values()
            for path, data in files.items()
            if hashlib.sha256(data).hexdigest() == digest
        )
        path, data = next(found, ("", b""))
        signed = f"X-Amz-Signature=signed-{digest}" in request.path
        if not path or not signed or "authorization" in request.headers:
            return Answer(b"<Error><Code>InvalidRequest</Code></Error>", 400)

        def good(request: Request) -> Answer:
            return send(request, data, f'"{hashlib.md5(data).hexdigest()}"')

        left = self.faults.get(path)
        return left.pop(0)(request, good) if left and request.method == "GET" else good(request)


def _pointer(data: bytes) -> bytes:
    """What git has in place of a file in LFS."""
    version = "version https://git-lfs.github.com/spec/v1"
    return f"{version}\noid sha256:{hashlib.sha256(data).hexdigest()}\nsize {len(data)}\n".encode()


def _json(value: object) -> Answer:
    return Answer(json.dumps(value).encode()).but(content_type="application/json; charset=utf-8")


def _error(code: int, name: str, message: str) -> Answer:
    answer = replace(_json({"error": message}), status=code)
    return answer.but(x_error_code=name or None, x_error_message=message)


@contextlib.contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serve a Hub and its CDN, which is at `cdn_url`, or at its own address if that is empty."""
    with serving(hub) as hub.server, serving(hub.answer_as_cdn) as hub.cdn:
        hub.cdn_url = hub.cdn_url or f"http://localhost:{hub.cdn.server_port}"
        yield hub


# S3


class S3:
    """A running S3 of moto: a client to fill it, and what it was asked by others.

    `faults` of a `/bucket` or `/bucket/key` are the statuses of its next GETs.
    """

    PART = 5 << 20
    """The smallest part of an upload in parts, in bytes."""

    def __init__(self, url: str) -> None:
        import boto3

        self.url = url
        self.requests: list[Request] = []
        self.faults: dict[str, list[int]] = {}
        keys = {"aws_access_key_id": "filler", "aws_secret_access_key": "filler", "region_name": "us-east-1"}
        self.client: Any = boto3.client("s3", endpoint_url=url, **keys)

    def asked(self, method: str = "GET") -> list[str]:
        """`/bucket/key` of every request with this method, those of `client` left out."""
        return [unquote(urlsplit(request.path).path) for request in self.requests if request.method == method]

    def make_bucket(self, name: str, files: Mapping[str, bytes]) -> None:
        self.client.create_bucket(Bucket=name)
        for key, data in files.items():
            self.client.put_object(Bucket=name, Key=key, Body=data)

    def put_in_parts(self, bucket: str, key: str, data: bytes, *sizes: int) -> None:
        """Upload in parts of these sizes, the last one as often as needed."""
        where = {"Bucket": bucket, "Key": key}
        where["UploadId"] = self.client.create_multipart_upload(**where)["UploadId"]
        parts, left = [], list(sizes or (self.PART,))
        while data:
            size = left.pop(0) if len(left) > 1 else left[0]
            sent = self.client.upload_part(**where, PartNumber=len(parts) + 1, Body=data[:size])
            parts.append({"PartNumber": len(parts) + 1, "ETag": sent["ETag"]})
            data = data[size:]
        self.client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})

    def put_encrypted(self, bucket: str, key: str, data: bytes) -> None:
        """An object under a key of KMS, whose ETag is no MD5. moto's is, so that it is changed."""
        from moto.backends import get_backend

        self.client.put_object(Bucket=bucket, Key=key, Body=data, ServerSideEncryption="aws:kms")
        backend = cast(Any, get_backend("s3"))["123456789012"]["aws"]
        backend.buckets[bucket].keys[key]._etag = hashlib.md5(b"encrypted " + data).hexdigest()

    def environment(self) -> dict[str, str]:
        """What makes boto3 find this S3 and nothing else, with an account that has a password."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIATESTACCOUNT",
            "AWS_SECRET_ACCESS_KEY": "the-secret-of-aws",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "2",
        }


@contextlib.contextmanager
def s3_server() -> Iterator[S3]:
    """An empty S3. A second one in the same process has the same buckets: moto has one state."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    class Quiet(MotoRequestHandler):
        def log(self, *_: object, **__: object) -> None:
            """Nothing."""

    moto = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start: Any) -> Any:
        names = (name for name in environ if name.startswith("HTTP_"))
        headers = {name[5:].lower().replace("_", "-"): str(environ[name]) for name in names}
        request = Request(environ["REQUEST_METHOD"], headers["host"], environ["REQUEST_URI"], headers)
        if "Credential=filler/" not in headers.get("authorization", ""):
            s3.requests.append(request)
            left = s3.faults.get(unquote(urlsplit(request.path).path))
            if left and request.method == "GET":
                start(f"{left.pop(0)} Fault", [("Retry-After", "0"), ("Content-Length", "0")])
                return []
        return moto(environ, start)

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    s3 = S3(f"http://127.0.0.1:{server.port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield s3
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        s3.client.close()
