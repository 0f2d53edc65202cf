"""Raw responses as WARC files: written by a crawl (1.0, one gzip member a record), read from anywhere.

    archive.warc.gz = warcinfo record, then one `response` record a fetched page

WARC-Target-URI is the URL that answered. The one that was asked for stands in X-Requested-URI where redirects, or only
its spelling, make it another: so the pages of an archive keep their names.
"""

import mmap
import os
import sys
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from warcio.archiveiterator import WARCIterator
from warcio.bufferedreaders import ChunkedDataReader
from warcio.exceptions import ArchiveLoadFailed
from warcio.statusandheaders import StatusAndHeaders, StatusAndHeadersParser
from warcio.warcwriter import WARCWriter

from common.errors import InputError
from corpus.content_coding import decode_body
from corpus.fetch import BINARY, PAGE_TYPES, Page
from corpus.network import PageError

_REQUESTED = "X-Requested-URI"
_MEMBER = b"\x1f\x8b\x08"  # the first bytes of a gzip member
_BLOCK = 1 << 16  # bytes read at a time
_BLANK = b"\xef\xbb\xbf \t\r\n"  # before the first tag, with UTF-8's byte-order mark
_HTTP = StatusAndHeadersParser([], verify=False)


class Archive:
    """An open WARC file. `end` is its length after the last record that counts; a torn rest is cut off."""

    def __init__(self, path: Path, end: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115 - closed by __exit__
        if self._file.tell() < end:
            self._file.close()
            raise InputError(f"{path}: shorter than the journal of this scrape says; delete the journal to start over")
        self._file.truncate(end)
        self._writer = WARCWriter(self._file, gzip=True)
        if end == 0:
            about = {"software": "urls-to-gpt2", "format": "WARC File Format 1.0"}
            self._writer.write_record(self._writer.create_warcinfo_record(path.name, about))
            self._file.flush()

    def __enter__(self) -> "Archive":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sync()
        self._file.close()

    def append(self, page: Page) -> int:
        """Write one response; the file's new length."""
        # The body is stored without its chunks, so the header that announces them goes, too.
        headers = [(name, value) for name, value in page.headers if name.lower() != "transfer-encoding"]
        status = StatusAndHeaders(f"{page.status} {page.reason}".strip(), headers, protocol="HTTP/1.1")
        record = self._writer.create_warc_record(
            page.url,
            "response",
            payload=BytesIO(page.raw),
            length=len(page.raw),
            http_headers=status,
            warc_headers_dict={_REQUESTED: page.requested} if page.requested != page.url else {},
        )
        self._writer.write_record(record)
        self._file.flush()
        return self._file.tell()

    def sync(self) -> None:
        """Wait until the disk has every record; safe to call from another thread."""
        os.fsync(self._file.fileno())


# ------------------------------------------------------------------------------------------------ reading


class _Member:
    """One gzip member of an open file, read like a file; read to its end, it leaves the file at the next one."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path, self._start = file, path, file.tell()
        self._stream = zlib.decompressobj(wbits=31)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes. Raises zlib.error for a damaged member, InputError where the file ends inside it."""
        while not self._stream.eof:
            packed = self._stream.unconsumed_tail or self._file.read(_BLOCK)
            data = self._stream.decompress(packed, size)
            if self._stream.eof:
                self._file.seek(-len(self._stream.unused_data), os.SEEK_CUR)
            elif not packed and not data:
                raise _truncated(self._path, self._start)
            if data:
                return data
        return b""


def _truncated(path: Path, start: int) -> InputError:
    return InputError(f"{path}: ends inside the record at byte {start}; fetch it again, or cut the file there")


def _seek_member(file: IO[bytes], start: int) -> None:
    """Move an open file to the first gzip member from `start` on that holds a record, or to its end."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        while (start := view.find(_MEMBER, start)) >= 0:
            try:
                if zlib.decompressobj(wbits=31).decompress(view[start : start + _BLOCK], 5) == b"WARC/":
                    file.seek(start)
                    return
            except zlib.error:
                pass  # these bytes stand anywhere in compressed data
            start += 1
    file.seek(0, os.SEEK_END)


def read_pages(path: Path, max_bytes: int) -> Iterator[tuple[str, Page | str]]:
    """Every response of a WARC file (plain or .gz), in order: its URL, and the page or the reason why there is none.

    A damaged record (`damaged`) costs no other one where each is a gzip member of its own. Raises InputError for a
    file that is no WARC, is cut off, or is damaged otherwise.
    """
    with path.open("rb") as file:
        while first := file.read(len(_MEMBER)):
            start = file.seek(-len(first), os.SEEK_CUR)
            packed = _MEMBER.startswith(first)
            # no_record_parse: an empty HTTP message would end the iteration
            records = WARCIterator(_Member(file, path) if packed else file, no_record_parse=True)
            count = 0
            try:
                for record in records:
                    where = start if packed else records.offset
                    count += 1
                    answer = _response(record, max_bytes) if record.rec_type == "response" else None
                    records.read_to_end()
                    if record.length is None or record.raw_stream.limit:  # fewer bytes than Content-Length says
                        if not packed:
                            raise _truncated(path, where)
                        raise zlib.error
                    if answer is not None:
                        yield answer
            except (ArchiveLoadFailed, zlib.error) as error:
                is_one_record = count <= 1 if isinstance(error, zlib.error) else start > 0 and count == 0
                if not is_one_record:
                    raise InputError(f"{path}: no WARC record after the first {count}; fetch it again") from None
                print(f"warning: {path}: the record at byte {start} is damaged and left out", file=sys.stderr)
                yield "", "damaged"
                _seek_member(file, start + 1)


def _response(record: Any, max_bytes: int) -> tuple[str, Page | str]:
    """URL and page of a `response` record, or the reason why it holds none."""
    url = record.rec_headers.get_header("WARC-Target-URI", "")
    requested = record.rec_headers.get_header(_REQUESTED, url)
    try:
        return requested, _page(record, url, requested, max_bytes)
    except PageError as error:
        return requested, error.reason
    except (EOFError, ValueError):
        return requested, "bad_response"


def _page(record: Any, url: str, requested: str, max_bytes: int) -> Page:
    """The page in a record, by the rules of a crawl. Raises PageError, or EOFError or ValueError for no HTTP."""
    if not url.startswith(("http:", "https:")):
        raise PageError("scheme")  # dns:, whois:
    http = _HTTP.parse(record.raw_stream)
    status = int(http.get_statuscode())
    if status not in (200, 203):
        raise PageError(f"http_{status}")
    if record.rec_headers.get_header("WARC-Truncated"):
        raise PageError("truncated")
    content_type = http.get_header("Content-Type", "")
    if content_type.partition(";")[0].strip().lower() not in PAGE_TYPES:
        raise PageError("content_type")
    raw = record.raw_stream.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise PageError("too_large")
    if http.get_header("Transfer-Encoding", "").strip().lower() == "chunked":
        raw = ChunkedDataReader(BytesIO(raw)).read()  # as it is, where it has no chunks
    encoding = http.get_header("Content-Encoding", "")
    try:
        body = decode_body(raw, encoding, max_bytes)
    except PageError as error:
        # Common Crawl stores bodies decoded; until August 2018 (CC-NEWS: May 2019) it left the old headers as they were
        decoded = raw[:64].lstrip(_BLANK).startswith(b"<") or ("gzip" in encoding.lower() and raw[:3] != _MEMBER)
        if error.reason != "bad_encoding" or not decoded:
            raise
        body = raw
    if body.startswith(BINARY):
        raise PageError("content_type")
    return Page(
        url=url,
        status=status,
        reason=http.statusline.partition(" ")[2],
        headers=tuple(http.headers),
        content_type=content_type,
        raw=raw,
        body=body,
        requested=requested,
    )
