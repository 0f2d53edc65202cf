"""Decode HTTP content codings (gzip, deflate, br, zstd, and chains of them) up to a size limit.

    body = decode_body(raw, "gzip", max_bytes=10_000_000)

As in browsers, data after a complete stream is ignored: servers append padding and comments. gzip members and zstd
frames may be concatenated.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import brotli
import zstandard

from common.errors import PageError

_GZIP, _ZLIB_OR_GZIP, _RAW = 31, 47, -15  # zlib's wbits
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # after a byte 0x50 to 0x5f
_ZSTD_WINDOW = 8 << 20  # bytes; RFC 9659: the largest that senders may expect a browser to support
_PIECE = 1 << 16  # bytes decoded at a time
_ZSTD_PIECE = 256  # zstandard has no output limit, and 4 bytes may expand to 128 KiB: up to 8 MiB beyond the cap
_MAX_CODINGS = 5  # in a chain; curl's limit
_MAX_STREAMS = 10_000  # concatenated; bgzip's, of 64 KiB, are 640 MB


def decode_body(raw: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decode a body by its Content-Encoding, and stop at `max_bytes` of output, which bounds the cost of a bomb.

    An empty body is valid in every coding. Raises PageError: `too_large`, or `bad_encoding` for a damaged, truncated or
    unknown stream.
    """
    codings = [coding for part in encoding.split(",") if (coding := part.strip().lower()) not in ("", "identity")]
    if len(codings) > _MAX_CODINGS or not set(codings) <= set(_DECODERS):
        raise PageError("bad_encoding")
    body = raw
    for coding in reversed(codings):
        try:
            body = _DECODERS[coding](body, max_bytes) if body else body
        except (zlib.error, brotli.error, zstandard.ZstdError):
            raise PageError("bad_encoding") from None
        if len(body) > max_bytes:
            break
    if len(body) > max_bytes:
        raise PageError("too_large")
    return body


def _streams(raw: bytes, cap: int, wbits: int | None, follows: Callable[[bytes], bool]) -> bytes:
    """Decode concatenated streams, and stop beyond the cap. Raises PageError if one is truncated.

    The streams are zlib's with these `wbits`, or zstd frames if None. `follows` gets the next 4 bytes and returns
    whether another stream begins there.
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
        if not follows(raw[position : position + 4]):
            return b"".join(output)
    raise PageError("bad_encoding")


def _gunzip(raw: bytes, cap: int) -> bytes:
    return _streams(raw, cap, _GZIP, lambda next4: next4.startswith(_GZIP_MAGIC))


def _inflate(raw: bytes, cap: int) -> bytes:
    """The zlib format; some servers send raw deflate, others gzip."""
    for wbits in (_ZLIB_OR_GZIP, _RAW):
        try:
            return _streams(raw, cap, wbits, lambda _: False)
        except zlib.error:
            if wbits == _RAW:
                raise
    raise AssertionError("unreachable")


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


def _unzstd(raw: bytes, cap: int) -> bytes:
    def follows(next4: bytes) -> bool:
        return next4 == _ZSTD_MAGIC or (next4[1:] == _ZSTD_SKIPPABLE and next4[0] >> 4 == 5)

    return _streams(raw, cap, None, follows)


_DECODERS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _inflate,
    "br": _unbrotli,
    "zstd": _unzstd,
}
