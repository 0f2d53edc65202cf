"""Records of WARC files byte by byte, as crawlers write them, right or wrong."""

import gzip
from functools import partial
from pathlib import Path

import zstandard


def http(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """An HTTP answer; header names are written with underscores."""
    fields = {"Content-Type": "text/html"} | {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def record(url: str, block: bytes, kind: str = "response", **headers: str) -> bytes:
    """One record."""
    fields = {"WARC-Type": kind, "WARC-Target-URI": url, "Content-Length": str(len(block))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"WARC/1.0\r\n{head}\r\n".encode() + block + b"\r\n\r\n"


def write_warc(path: Path, *records: bytes) -> Path:
    """A WARC file: a gzip member or a zstd frame per record where its name ends in .gz or .zst,
    plain otherwise.
    """
    packed = {
        ".gz": partial(gzip.compress, mtime=0),
        ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    }.get(path.suffix, bytes)
    path.write_bytes(b"".join(map(packed, records)))
    return path
