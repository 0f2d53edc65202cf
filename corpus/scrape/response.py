"""A server's response as a page, a redirect, or a `PageError` with a named reason."""

import re
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from io import BytesIO
from typing import Any

import aiohttp
import brotli
import zstandard
from warcio.bufferedreaders import ChunkedDataReader
from yarl import URL

from common.console import warn
from common.errors import PageError
from common.files import is_binary
from corpus.urls.url import Url

PAGE_TYPES = frozenset({"text/html", "application/xhtml+xml", "text/plain"})
REDIRECTS = frozenset({301, 302, 303, 307, 308})
_GZIP, _ZLIB_OR_GZIP, _RAW = 31, 47, -15  # zlib's wbits
_GZIP_MEMBER = re.compile(rb"\x1f\x8b")
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_FRAME = re.compile(re.escape(ZSTD_MAGIC) + rb"|[\x50-\x5f]\x2a\x4d\x18")  # or a skippable one
_ZSTD_WINDOW = 8 << 20  # bytes; RFC 9659: the largest that senders may expect a browser to support
_PIECE = 1 << 16  # bytes decoded at a time
_ZSTD_PIECE = 256  # zstandard has no output limit, and 4 bytes may expand to 128 KiB: up to 8 MiB beyond the cap
_MAX_CODINGS = 5  # in a chain; curl's limit
_MAX_STREAMS = 10_000  # concatenated; bgzip's, of 64 KiB, are 640 MB
_LISTED = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')  # commas in quotes separate nothing
_TYPE = re.compile(r"\s*([\w!#$%&'*+.^`|~-]+/[\w!#$%&'*+.^`|~-]+)(?=[\s;(]|$)")
_TRAILERS = re.compile(rb"\r\n0+[ \t]*(;[^\r\n]*)?\r\n([^\s:]+:[^\r\n]*\r\n)*(\r\n)?\Z")  # warcio keeps them


@dataclass(frozen=True)
class FetchedPage:
    """A response with a page. Its URL is the logical one, not the address it came from."""

    url: str
    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    content_type: str
    raw: bytes
    """The body as sent, without chunked framing."""
    body: bytes
    """The body without its Content-Encoding."""
    requested: str = ""
    """The URL requested, before redirects, as given."""
    hops: tuple[str, ...] = ()
    """URLs of the redirects between the two."""
    reserved_by: str | None = None
    """What reserves text and data mining; "" if it is expressly free, None if unknown."""
    archived: bool = False
    """Whether the page comes from a WARC file."""
    origin: str = ""
    """FILE:BYTE of its record in a WARC file that is an input."""
    date: str = ""
    """The day on which it was fetched, in UTC, "2026-11-26"; empty if unknown."""


async def read_response(
    response: aiohttp.ClientResponse, url: Url, types: frozenset[str] | None, max_bytes: int
) -> FetchedPage | str:
    """Read a response: a page, or the URL of a redirect.

    `types` are the accepted content types; None accepts all. Raises PageError for other responses,
    and for a body of more than `max_bytes`, as sent or decoded.
    """
    if response.status in REDIRECTS and "Location" in response.headers:
        try:
            return str(URL(url.text).join(URL(response.headers["Location"])))
        except ValueError:
            raise PageError("redirect_refused") from None
    if response.status not in (200, 203):
        transient = response.status == 429 or response.status >= 500
        raise PageError(f"http_{response.status}", transient=transient, wait=retry_after(response))
    headers = tuple((_ascii(name), _ascii(value)) for name, value in response.raw_headers)
    content_type, essence = media_type(headers)
    if types is not None and essence not in types:
        raise PageError("content_type")
    if (response.content_length or 0) > max_bytes:
        raise PageError("too_large")
    received = bytearray()
    async for piece in response.content.iter_any():
        received += piece
        if len(received) > max_bytes:
            raise PageError("too_large")
    # one copy only: for a large page, a second one costs as much as the request
    raw, encoding = unframed(bytes(received), headers)
    body = decode_body(raw, encoding, max_bytes)
    if types is not None and is_binary(body):
        raise PageError("content_type")
    return FetchedPage(
        url=url.text,
        status=response.status,
        reason=_ascii((response.reason or "").encode("utf-8", "surrogateescape")),
        headers=headers,
        content_type=content_type,
        raw=raw,
        body=body,
        date=datetime.now(UTC).date().isoformat(),
    )


def _ascii(header: bytes) -> str:
    """A header as an archive can store it: other bytes than ASCII become `caf\\xe9`."""
    return header.decode("ascii", "backslashreplace")


def _values(headers: Iterable[tuple[str, str]], name: str) -> str:
    """All values of a header, as one list."""
    return ", ".join(value for key, value in headers if key.lower() == name)


def media_type(headers: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """The valid Content-Type, and its type/subtype in lower case, by the Fetch standard.

    The last valid one counts, or an earlier one of its type if only that names a charset. Both are
    empty if there is none.
    """
    value = essence = ""
    for part in _LISTED.findall(_values(headers, "content-type")):
        kind = match[1].lower() if (match := _TYPE.match(part)) else "*/*"
        if kind != "*/*" and (kind != essence or "charset" in part.lower()):
            value, essence = part.strip(), kind
    return value, essence


def unframed(raw: bytes, headers: Iterable[tuple[str, str]]) -> tuple[bytes, str]:
    """A body without chunks and trailers, and its codings in the order in which they were applied.

    Some archives keep a Transfer-Encoding without its chunks: a body that begins with none stays.
    """
    if framing := _values(headers, "transfer-encoding"):
        raw = ChunkedDataReader(BytesIO(_TRAILERS.sub(b"\r\n0\r\n\r\n", raw))).read()
    return raw, f"{_values(headers, 'content-encoding')}, {framing}"


def retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds to wait, from either form of Retry-After; 0 without a valid one."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):  # not a date, or one without a time zone
        return 0.0


def to_page_error(error: Exception, url: str) -> PageError:
    """The PageError for an exception raised by a request."""
    match error:
        case aiohttp.ConnectionTimeoutError():  # before its base class TimeoutError
            return PageError("connection", transient=True)
        case TimeoutError():
            return PageError("timeout")
        case aiohttp.ClientConnectorDNSError():
            code = getattr(error.os_error, "errno", None)
            return PageError("dns", transient=code == socket.EAI_AGAIN)
        case aiohttp.ClientSSLError() | aiohttp.ClientConnectorCertificateError():
            return PageError("tls")
        case aiohttp.ClientResponseError():
            return PageError("bad_response")
        case aiohttp.InvalidURL() | ValueError():
            return PageError("bad_url")
        case aiohttp.ClientError() | OSError():  # refused, reset, closed early
            return PageError("connection", transient=True)
    # one odd page must not stop a crawl of millions
    warn(f"{url}: {type(error).__name__}: {error}")
    return PageError("unexpected")


# ------------------------------------------------------------ content codings


def decode_body(raw: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decode a body by its Content-Encoding; stops at `max_bytes` of output (decompression bombs).

    As in browsers, unknown codings (`none`, `utf-8`) and data after a complete stream are ignored.
    gzip members and zstd frames may be concatenated. An empty body is valid in every coding. Raises
    PageError: `too_large`, or `bad_encoding` for a damaged or truncated stream.
    """
    known = [coding for part in encoding.split(",") if (coding := part.strip().lower()) in _DECODERS]
    if len(known) > _MAX_CODINGS:
        raise PageError("bad_encoding")
    body = raw
    for coding in reversed(known):
        try:
            body = _DECODERS[coding](body, max_bytes) if body else body
        except (zlib.error, brotli.error, zstandard.ZstdError):
            raise PageError("bad_encoding") from None
        if len(body) > max_bytes:
            break
    if len(body) > max_bytes:
        raise PageError("too_large")
    return body


def _streams(raw: bytes, cap: int, wbits: int | None, following: re.Pattern[bytes] | None = None) -> bytes:
    """Decode concatenated streams, and stop beyond the cap. Raises PageError if one is truncated.

    They are zlib's with these `wbits`, or zstd frames if None. `following` matches the beginning of
    the next stream.
    """
    frames = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    piece = _ZSTD_PIECE if wbits is None else _PIECE
    output: list[bytes] = []
    size = position = 0
    for _ in range(_MAX_STREAMS):
        stream: Any = frames.decompressobj() if wbits is None else zlib.decompressobj(wbits)
        while not stream.eof:
            data = raw[position : position + piece]
            if not data:
                raise PageError("bad_encoding")
            limit = () if wbits is None else (cap + 1 - size,)
            output.append(stream.decompress(data, *limit))
            position, size = position + len(data), size + len(output[-1])
            if size > cap:
                return b"".join(output)
        position -= len(stream.unused_data)
        if following is None or not following.match(raw, position):
            return b"".join(output)
    raise PageError("bad_encoding")


def _inflate(raw: bytes, cap: int) -> bytes:
    """The zlib format; some servers send raw deflate, others gzip."""
    try:
        return _streams(raw, cap, _ZLIB_OR_GZIP)
    except zlib.error:
        return _streams(raw, cap, _RAW)


def _unbrotli(raw: bytes, cap: int) -> bytes:
    stream = brotli.Decompressor()
    output = [stream.process(raw, output_buffer_limit=cap + 1)]
    size = len(output[0])
    while size <= cap and not stream.is_finished():
        output.append(stream.process(b"", output_buffer_limit=cap + 1 - size))
        if not output[-1]:
            raise PageError("bad_encoding")
        size += len(output[-1])
    return b"".join(output)


_gunzip = partial(_streams, wbits=_GZIP, following=_GZIP_MEMBER)
_DECODERS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _inflate,
    "br": _unbrotli,
    "zstd": partial(_streams, wbits=None, following=_ZSTD_FRAME),
}
