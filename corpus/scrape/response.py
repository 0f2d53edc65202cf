"""A server's response as a page, a redirect, or a `PageError` with a named reason."""

import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import aiohttp
from yarl import URL

from common.console import warn
from common.errors import PageError
from corpus.scrape.content_coding import decode_body
from corpus.urls.url import Url

PAGE_TYPES = frozenset({"text/html", "application/xhtml+xml", "text/plain"})
BINARY_PREFIXES = (b"%PDF-", b"PK\x03\x04", b"\x89PNG", b"GIF8", b"\xff\xd8\xff")  # files served as HTML by mistake
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True)
class FetchedPage:
    """A response with a page. Its URL is the logical one, whatever address it came from."""

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


async def read_response(
    response: aiohttp.ClientResponse, url: Url, types: frozenset[str] | None, max_bytes: int
) -> FetchedPage | str:
    """Read a response: a page, or the URL of a redirect. `types` are the accepted content types; None accepts all.

    Raises PageError for any other response, and for a body of more than `max_bytes`, as sent or decoded.
    """
    if response.status in _REDIRECTS and "Location" in response.headers:
        return _redirect_target(url, response.headers["Location"])
    if response.status not in (200, 203):
        transient = response.status == 429 or response.status >= 500
        raise PageError(f"http_{response.status}", transient=transient, wait=_retry_after(response))
    if types is not None and response.content_type not in types:
        raise PageError("content_type")
    if (response.content_length or 0) > max_bytes:
        raise PageError("too_large")
    received = bytearray()
    async for piece in response.content.iter_any():
        received += piece
        if len(received) > max_bytes:
            raise PageError("too_large")
    raw = bytes(received)  # the only copy: for a large page, a second one costs as much as the request
    body = decode_body(raw, response.headers.get("Content-Encoding", ""), max_bytes)
    if types is not None and body.startswith(BINARY_PREFIXES):
        raise PageError("content_type")
    return FetchedPage(
        url=url.text,
        status=response.status,
        reason=_ascii((response.reason or "").encode("utf-8", "surrogateescape")),
        headers=tuple((_ascii(name), _ascii(value)) for name, value in response.raw_headers),
        content_type=response.headers.get("Content-Type", ""),
        raw=raw,
        body=body,
    )


def _ascii(header: bytes) -> str:
    """A header as an archive can store it: other bytes than ASCII become `caf\\xe9`."""
    return header.decode("ascii", "backslashreplace")


def _redirect_target(url: Url, location: str) -> str:
    """The absolute URL of a redirect."""
    try:
        return str(URL(url.text).join(URL(location)))
    except ValueError:
        raise PageError("redirect_refused") from None


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds that a server asks to wait, from either form of Retry-After; 0 without a valid one."""
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
    # One odd page must not stop a crawl of millions; the log has the exception.
    warn(f"{url}: {type(error).__name__}: {error}")
    return PageError("unexpected")
